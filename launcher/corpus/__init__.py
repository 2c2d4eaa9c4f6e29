"""Data preparation: rows are tokenized and packed into Arrow files once, so that no GPU waits for a tokenizer."""
