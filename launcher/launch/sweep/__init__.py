"""Hyperparameter search: parameters of the manifest, an Optuna study, and a run per trial."""
