"""Estimates of memory, step time, communication and dataset size."""
