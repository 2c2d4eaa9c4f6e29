"""Numerical checks before the first step."""
