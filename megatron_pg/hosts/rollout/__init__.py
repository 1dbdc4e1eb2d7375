"""slime and miles: the loss on a rollout that the trainer has cut into micro-batches."""
