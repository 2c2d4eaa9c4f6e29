"""Regression test of an expert: trained the old way and the optimized way on the same rows, graded and compared."""
