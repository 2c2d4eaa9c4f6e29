"""Find problems of this machine, of an expert's plan on it, or of a run: probes collect facts, checks make findings."""
