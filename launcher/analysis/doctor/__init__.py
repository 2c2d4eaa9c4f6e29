"""What is wrong with this machine, with an expert's plan on it, or with a run: probes look, judges judge."""
