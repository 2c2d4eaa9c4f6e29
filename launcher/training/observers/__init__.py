"""Callbacks of the training loop, one feature per file."""
