"""Features of a training, one file each, behind one interface that does nothing by itself."""
