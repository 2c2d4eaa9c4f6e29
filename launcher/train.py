"""The script that accelerate starts: `accelerate launch launcher/train.py --manifest …`, or with `--plan …`.

This version checks its input and ends: training itself is not part of it yet.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# accelerate puts this file's folder first on sys.path, where our module names could capture other packages' imports.
# The package's parent is what belongs there.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launcher.errors import ExitCode, InputError, LauncherError  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launcher/train.py", description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", type=Path, metavar="FILE", help="a plan that `launcher train` wrote")
    source.add_argument("--manifest", type=Path, metavar="FILE", help="a manifest, planned for what accelerate started")
    arguments = parser.parse_args(argv)
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        check_input(arguments.plan, arguments.manifest)
    except LauncherError as error:
        if is_first:
            print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    if is_first:
        print("Nothing was trained: training itself is not part of this version of the launcher yet.", file=sys.stderr)
    return int(ExitCode.RUN_FAILED)


def check_input(plan: Path | None, manifest: Path | None) -> None:
    from pydantic import ValidationError

    from launcher.manifest import load_manifest
    from launcher.plan import Plan

    if manifest is not None:
        load_manifest(manifest)
    if plan is not None:
        try:
            Plan.model_validate_json(plan.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{plan}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"{plan}: not a plan: it is not UTF-8") from None
        except ValidationError as error:
            raise InputError(f"{plan}: not a plan of this version ({error.error_count()} problems)") from None


if __name__ == "__main__":
    sys.exit(main())
