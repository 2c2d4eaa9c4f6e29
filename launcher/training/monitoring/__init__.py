"""Throughput, memory, GPU counters and goodput of a training."""
