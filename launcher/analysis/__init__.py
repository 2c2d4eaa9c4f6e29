"""What is made from finished and running runs: report, comparison, diagnosis, W&B dashboard."""
