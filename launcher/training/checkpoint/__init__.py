"""Checkpoints: state dicts of any engine, snapshots, resume."""
