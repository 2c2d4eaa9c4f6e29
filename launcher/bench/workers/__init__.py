"""Worker processes of `launcher bench`: each builds what a plan says, trains a few steps and reports their times."""
