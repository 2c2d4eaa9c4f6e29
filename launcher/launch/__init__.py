"""Write a run directory, start accelerate, supervise and restart it."""
