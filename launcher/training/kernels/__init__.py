"""Triton kernels and custom ops; README.md has the equations."""
