"""Judges of an expert's answers, which use real parsers, compilers and databases."""
