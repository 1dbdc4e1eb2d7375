"""Samples and the rollout file; `lines`, `fields` and `printable` need no torch."""
