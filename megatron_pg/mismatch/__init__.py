"""Why the trainer's log-probabilities differ from the rollout engine's, from rollouts alone. Needs numpy, no torch."""
