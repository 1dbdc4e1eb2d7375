"""The policy-gradient loss inside trainers that own the loop: what their adapters share, and the adapters."""
