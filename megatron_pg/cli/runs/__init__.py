"""Subcommands that read a run's metrics: plot, report."""
