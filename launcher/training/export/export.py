"""`python -m launcher.training.export.export`: merges adapter and base into one model, and verifies it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.core.choices import Dtype
from launcher.core.errors import InputError
from launcher.core.log import get_logger
from launcher.core.processes import is_alive
from launcher.training.inference.trained_run import TrainedRun, load_trained_run
from launcher.training.runtime.parent_watch import exit_with_parent
from launcher.training.runtime.subcommand import run_subcommand

if TYPE_CHECKING:
    from launcher.training.export.logits_check import Agreement

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the export and return the exit code."""
    arguments = _make_parser().parse_args(argv)
    exit_with_parent()
    return run_subcommand("export", lambda: _export(arguments), is_json=arguments.json)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.training.export.export", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--json", action="store_true")
    return parser


def _export(arguments: argparse.Namespace) -> str:
    run = load_trained_run(arguments.run)
    target = arguments.out or run.paths.merged
    check_target(target)
    if run.ended_early and run.outcome is not None:
        log.info(f"note: status {run.outcome.status}, not done: {run.outcome.steps_done:,} steps were trained")
    from launcher.training.export.logits_check import format_agreement

    dtype, agreement = export_run(run, target, arguments.dtype)
    log.info(f"checked: {format_agreement(agreement)}")
    log.info(f"written in {dtype}; AutoModelForCausalLM.from_pretrained loads it")
    if arguments.json:
        return json.dumps({"directory": str(target), "dtype": dtype, "agreement": format_agreement(agreement)})
    return str(target)


def export_run(run: TrainedRun, target: Path, dtype: Dtype | None) -> tuple[Dtype, Agreement]:
    """Write to a temporary folder, verify, then rename: an existing target is always complete and correct."""
    from launcher.training.export.merge import merge_into

    check_target(target)
    with _temporary_folder(target) as scratch:
        result = merge_into(scratch, run, dtype, log.info)
        try:
            scratch.rename(target)
        except OSError as error:
            raise InputError(
                f"cannot create {target}: {error.strerror}", hint="choose another folder with --out"
            ) from None
    return result


def check_target(target: Path) -> None:
    """Raise InputError if the target exists."""
    if os.path.lexists(target):
        raise InputError(f"{target} already exists", hint="choose another folder with --out, or delete it first")


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a folder next to the target, removed at the end; those of killed processes are removed, too."""
    folder = target.with_name(f".{target.name}.making-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(f".{target.name}.making-*"):
            pid = leftover.name.rpartition("-")[2]
            if not (pid.isdecimal() and is_alive(int(pid))):
                shutil.rmtree(leftover, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise InputError(f"cannot create {folder}: {error.strerror}", hint="choose another folder with --out") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
