"""One optimizer step: counts, weights, loss, Megatron's loss scaling, and the schedule around them."""
