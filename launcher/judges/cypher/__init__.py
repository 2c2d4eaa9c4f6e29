"""Judge of Cypher answers."""
