"""Generators of those pages of docs/ that are made from the code. `python -m tools.docs [--check]`."""
