"""The W&B workspace as code: what it shows is a value here; wandb-workspaces turns it into a specification."""
