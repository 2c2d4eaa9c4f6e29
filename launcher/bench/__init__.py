"""Measure training speed: A/B tests of one setting (`--vary`), ablations, attention backends, regression tests."""
