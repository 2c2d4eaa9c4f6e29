"""Validation loss and task metrics during training."""
