"""Judge of JSON answers."""
