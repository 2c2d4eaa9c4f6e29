"""Processes that `launcher bench` starts: they build what a plan says, train a few steps of it, and tell the times."""
