"""Base model, adapters, attention backends and loss."""
