"""Read and write the files of a run directory and of the local cache."""
