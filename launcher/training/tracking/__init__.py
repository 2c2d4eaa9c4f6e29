"""The W&B uploader, which runs as a separate process."""
