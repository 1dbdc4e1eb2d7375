"""verl: the loss in its Megatron engine."""
