"""expert-launcher: from an expert manifest to a plan, to accelerate configuration, to the same training anywhere."""

__version__ = "0.2.0"
