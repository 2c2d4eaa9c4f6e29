"""Judge of TypeScript answers."""
