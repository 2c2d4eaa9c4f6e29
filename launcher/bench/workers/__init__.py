"""Worker processes of `launcher bench`: each times a few training steps of a plan, or one attention backend."""
