"""Judge of SQL answers."""
