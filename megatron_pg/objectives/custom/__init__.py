"""Objectives that a user declares."""
