"""Rows that somebody brings -> an expert of their own: what plays which role, in which sizes, judged by whom."""
