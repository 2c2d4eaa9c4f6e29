"""Checks of several nodes before anything is loaded."""
