"""Hardware to plan for: GPU catalogue, probe of this machine, launch environment."""
