"""Versions of the packages that a training runs on."""

from __future__ import annotations

from importlib import metadata

# What moves losses, memory or speed besides the plan.
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "deepspeed",
    "bitsandbytes",
    "triton",
    "flash-attn-4",
    "numpy",
)


def find_version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_package_versions() -> dict[str, str]:
    """Of those that are installed."""
    found = ((package, find_version(package)) for package in PACKAGES)
    return {package: version for package, version in found if version is not None}
