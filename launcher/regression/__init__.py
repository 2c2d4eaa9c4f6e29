"""An expert trained as people did it by hand and as the launcher does it: the same rows, the same judge, a verdict."""
