"""Importance weights, rejection and token selection."""
