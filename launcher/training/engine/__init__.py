"""Accelerator, optimizer, micro-steps and updates of a training run."""
