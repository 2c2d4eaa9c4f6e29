"""Uploaders to W&B, TensorBoard and MLflow, which run as separate processes."""
