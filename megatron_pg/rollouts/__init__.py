"""Samples and the rollout file that holds them; `lines`, `fields` and `printable` need no torch."""
