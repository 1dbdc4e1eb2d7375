"""One micro-batch: samples laid out as Megatron wants them, and this rank's slice of it."""
