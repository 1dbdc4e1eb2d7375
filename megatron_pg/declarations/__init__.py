"""What an aggregation, objective, correction and KL estimator is: one entry each, read by everything else.

Flags, rules, banner, `megatron-pg explain`, metrics, docs, plan and loss read these tables when they run, so an entry
is all that a new one needs in addition to its function, which is loaded on first use. Needs no torch.
"""
