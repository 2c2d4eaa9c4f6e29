"""`launcher schema`: the JSON Schema of a manifest, for editors."""

from __future__ import annotations

import argparse
import sys

from launcher.errors import ExitCode

HELP = "print the JSON Schema of a manifest, for editors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # no arguments


def run(arguments: argparse.Namespace) -> ExitCode:
    del arguments
    from launcher.manifest.json_schema import render_json_schema

    sys.stdout.write(render_json_schema())
    return ExitCode.DONE
