"""Generation and evaluation with a trained run."""
