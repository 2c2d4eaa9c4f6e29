"""Merged models and model cards."""
