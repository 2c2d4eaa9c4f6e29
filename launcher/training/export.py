"""`python -m launcher.training.export`: adapter and base become one model, checked before anybody sees it."""

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

from launcher.choices import Dtype
from launcher.errors import InputError, say
from launcher.processes import is_alive
from launcher.training.finished import FinishedRun, load_finished
from launcher.training.guards import end_with_parents
from launcher.training.verb import run_verb

if TYPE_CHECKING:
    from launcher.training.agreement import Agreement


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _make_parser().parse_args(argv)
    end_with_parents()
    return run_verb("export", lambda: _export(arguments), is_json=arguments.json)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.training.export", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--json", action="store_true")
    return parser


def _export(arguments: argparse.Namespace) -> str:
    run = load_finished(arguments.run)
    target = arguments.out or run.paths.merged
    check_target(target)
    if run.is_cut_short and run.outcome is not None:
        say(f"note: this run is {run.outcome.status}, not done: {run.outcome.steps_done:,} steps were trained")
    from launcher.training.agreement import format_agreement

    dtype, agreement = export_run(run, target, arguments.dtype)
    say(f"checked: {format_agreement(agreement)}")
    say(f"written in {dtype}; AutoModelForCausalLM.from_pretrained loads it")
    if arguments.json:
        return json.dumps({"directory": str(target), "dtype": dtype, "agreement": format_agreement(agreement)})
    return str(target)


def export_run(run: FinishedRun, target: Path, wanted: Dtype | None) -> tuple[Dtype, Agreement]:
    """Written beside, read back, compared, renamed: a folder that exists is whole and right."""
    from launcher.training.merging import merge_into

    check_target(target)
    with _scratch_beside(target) as scratch:
        result = merge_into(scratch, run, wanted, say)
        try:
            scratch.rename(target)
        except OSError as error:
            raise InputError(f"{target} cannot be made: {error.strerror}", hint="--out names another place") from None
    return result


def check_target(target: Path) -> None:
    if os.path.lexists(target):
        raise InputError(f"{target} exists already", hint="--out names another folder; or delete that one first")


@contextmanager
def _scratch_beside(target: Path) -> Iterator[Path]:
    """Gone afterwards, whatever happens; so is what a killed process left of an earlier one."""
    folder = target.with_name(f".{target.name}.making-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for rubbish in target.parent.glob(f".{target.name}.making-*"):
            pid = rubbish.name.rpartition("-")[2]
            if not (pid.isdecimal() and is_alive(int(pid))):
                shutil.rmtree(rubbish, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}", hint="--out names another place") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
