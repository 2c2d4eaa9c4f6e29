"""What a run directory and the local cache contain, read back."""
