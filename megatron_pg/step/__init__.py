"""One optimizer step through Megatron's schedule: checks, loss, loss scaling and report."""
