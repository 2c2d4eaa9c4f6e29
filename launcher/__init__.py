"""expert-launcher: an expert manifest becomes a plan, the plan becomes files, the files start one training anywhere."""

__version__ = "0.1.0"
