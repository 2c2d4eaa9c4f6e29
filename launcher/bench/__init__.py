"""Speed compared honestly: one change at a time, or the whole ladder from an unoptimised loop to ours."""
