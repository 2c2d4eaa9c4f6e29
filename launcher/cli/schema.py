"""`launcher schema`: print the JSON Schema of a manifest, for editors."""

from __future__ import annotations

import argparse
import sys

from launcher.core.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no flags."""
    del parser  # no arguments


def run(arguments: argparse.Namespace) -> ExitCode:
    """Print the JSON Schema of manifests."""
    del arguments
    from launcher.manifest.json_schema import render_json_schema

    sys.stdout.write(render_json_schema())
    return ExitCode.DONE
