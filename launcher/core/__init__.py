"""Foundations that every package uses: errors, logging, paths, metrics, processes."""
