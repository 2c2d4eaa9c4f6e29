"""The W&B workspace as code, turned into a specification by wandb-workspaces."""
