"""Subcommands that read rollout files: convert, compare, mismatch."""
