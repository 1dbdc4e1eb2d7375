"""What differs between the trainer's and the rollout engine's log-probabilities, told from rollouts alone; numpy, no torch."""
