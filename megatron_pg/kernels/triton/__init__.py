"""The loss and its parts in Triton."""
