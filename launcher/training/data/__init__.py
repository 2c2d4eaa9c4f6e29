"""Order of packs, assignment to ranks, collation, loading."""
