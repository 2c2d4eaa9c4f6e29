"""Versions of the packages that a training runs on."""

from __future__ import annotations

from importlib import metadata

# Packages that affect losses, memory or speed.
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "deepspeed",
    "bitsandbytes",
    "triton",
    "flash-attn",
    "flash-attn-4",
    "numpy",
)


def find_version(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_package_versions() -> dict[str, str]:
    """Return the versions of installed packages that affect losses, memory or speed."""
    versions = ((package, find_version(package)) for package in PACKAGES)
    return {package: version for package, version in versions if version is not None}
