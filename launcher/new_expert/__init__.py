"""`launcher new`: infer the layout of a dataset and write the manifest of a new expert."""
