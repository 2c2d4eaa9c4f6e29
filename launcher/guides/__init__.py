"""Pages of docs/ that are made from the code they describe. `python -m launcher.guides [--check]`."""
