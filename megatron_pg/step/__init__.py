"""One optimizer step: counts, weights, loss, Megatron's contract, and the schedule around them."""
