"""NeMo-RL: the loss in its Megatron worker, planned by its driver."""
