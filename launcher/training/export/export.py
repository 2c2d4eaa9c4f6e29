"""`python -m launcher.training.export.export`: write a run's model to a folder, verify it and upload it to the Hub."""

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

from launcher.core.errors import InputError
from launcher.core.log import get_logger
from launcher.core.processes import is_alive
from launcher.core.run_paths import write_text_atomically
from launcher.corpus.documents import make_planned_template
from launcher.corpus.end_token import collect_end_ids
from launcher.corpus.tokenizer import load_planned_tokenizer
from launcher.request.request import base_folders
from launcher.training.export.gguf import (
    INSTALL_LLAMA,
    QUANTIZATIONS,
    Conversion,
    check_tools,
    find_window,
    has_llama_cpp,
    write_files,
)
from launcher.training.export.model_card import CARD_FILE
from launcher.training.export.push import check_access, check_repo
from launcher.training.export.serving import describe_window, render_modelfile
from launcher.training.inference.trained_run import TrainedRun, load_trained_run
from launcher.training.runtime.parent_watch import exit_with_parent
from launcher.training.runtime.subcommand import run_subcommand

if TYPE_CHECKING:
    from launcher.training.export.gguf_check import ModelCheck

log = get_logger(__name__)

_CHECKED_ROWS = 20
_FOLDERS = {"merged": "merged", "gguf": "gguf", "adapter": "peft"}  # in the run directory


def main(argv: Sequence[str] | None = None) -> int:
    """Run the export and return the exit code."""
    arguments = _make_parser().parse_args(argv)
    exit_with_parent()
    return run_subcommand("export", lambda: _export(arguments), is_json=arguments.json)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.training.export.export", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--format", choices=_FOLDERS, default="merged")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--quantization", type=lambda text: tuple(dict.fromkeys(text.lower().split(","))))
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR")
    parser.add_argument("--check-rows", type=int, metavar="N")
    parser.add_argument("--push", metavar="REPO")
    parser.add_argument("--public", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def _export(arguments: argparse.Namespace) -> str:
    _check_options(arguments)
    run = load_trained_run(arguments.run)
    target = arguments.out or run.paths.root / _FOLDERS[arguments.format]
    result: dict[str, object] = {}
    if _can_reuse(run, target, arguments):
        log.info(f"{target} was exported before")
    else:
        if os.path.lexists(target):
            raise InputError(f"{target} already exists", hint="choose another folder with --out, or delete it first")
        if run.ended_early and run.outcome is not None:
            log.info(
                f"note: the run did not finish (status {run.outcome.status}): its weights are those after "
                f"{run.outcome.steps_done:,} steps"
            )
        export = {"merged": _export_merged, "gguf": _export_gguf, "adapter": _export_adapter}[arguments.format]
        result = export(run, target, arguments)
    text = str(target)
    if arguments.push is not None:
        text = _push(run, target, arguments)
        result["push"] = text
    return json.dumps({"directory": str(target), **result}) if arguments.json else text


def _can_reuse(run: TrainedRun, target: Path, arguments: argparse.Namespace) -> bool:
    """Return whether --push can upload the folder of an earlier export; raise InputError if it has older weights."""
    options = (arguments.dtype, arguments.quantization, arguments.llama_cpp, arguments.check_rows)
    card = target / CARD_FILE
    if arguments.push is None or any(option is not None for option in options) or not card.is_file():
        return False
    newest = max(file.stat().st_mtime for file in run.paths.adapter.iterdir())
    if newest > card.stat().st_mtime:
        raise InputError(f"{target} is older than the weights of the run", hint="delete it, or choose another --out")
    return True


def _push(run: TrainedRun, target: Path, arguments: argparse.Namespace) -> str:
    from launcher.training.export.push import describe_uploads, push

    if arguments.dry_run:
        return describe_uploads(target, arguments.push, is_public=arguments.public)
    message = f"Upload {arguments.format} of run {run.paths.run_id}"
    return push(target, arguments.push, is_public=arguments.public, message=message, report=log.info)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise InputError for flags of another --format and for formats that need packages that are not installed."""
    only = {"--dtype": "merged", "--quantization": "gguf", "--llama-cpp": "gguf", "--check-rows": "gguf"}
    for flag, needed in only.items():
        is_given = getattr(arguments, flag[2:].replace("-", "_")) is not None
        if is_given and needed != arguments.format:
            raise InputError(f"{flag} applies to --format {needed} only, not to {arguments.format}")
    if arguments.push is None and (arguments.public or arguments.dry_run):
        raise InputError("--public and --dry-run require --push REPO")
    if arguments.push is not None:
        check_repo(arguments.push)
        if not arguments.dry_run:
            check_access()
    if arguments.format == "gguf":
        requested = arguments.quantization or ("f16",)
        unknown = [name for name in requested if name not in QUANTIZATIONS]
        if unknown:
            raise InputError(
                f"--quantization {','.join(unknown)}: unknown", hint=f"choose from {', '.join(QUANTIZATIONS)}"
            )
        check_tools(requested, arguments.llama_cpp)


def _export_merged(run: TrainedRun, target: Path, arguments: argparse.Namespace) -> dict[str, object]:
    from launcher.training.export.logits_check import format_agreement
    from launcher.training.export.merge import merge_into

    with _writing(target) as scratch:
        dtype, agreement = merge_into(scratch, run, arguments.dtype, log.info)
    log.info(f"checked: {format_agreement(agreement)}")
    log.info(f"written in {dtype}; AutoModelForCausalLM.from_pretrained loads it")
    return {"dtype": dtype, "agreement": format_agreement(agreement)}


def _export_gguf(run: TrainedRun, target: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Merge into a temporary folder, convert to GGUF, compare the files' answers on held-out rows, then rename."""
    from launcher.training.export.gguf_check import render_checks

    with _writing(target) as scratch:
        checks, window = _write_gguf(scratch, run, arguments)
    for line in render_checks(checks) if checks else ():
        log.info(line)
    return {
        "files": sorted(file.name for file in target.glob("*.gguf")),
        "max_context": window,
        "checks": [check.model_dump() for check in checks],
    }


def _write_gguf(folder: Path, run: TrainedRun, arguments: argparse.Namespace) -> tuple[list[ModelCheck], int | None]:
    """Write GGUF files, Modelfile and model card.

    Returns how each model's answers compare, empty if no file was run, and the context limit of the files or None.
    """
    from transformers import AutoConfig

    from launcher.training.export.gguf_check import check_files, render_checks
    from launcher.training.export.merge import merge_into, render_export_card

    merged = folder / "merged"
    merged.mkdir()
    dtype, _ = merge_into(merged, run, None, log.info)
    tokenizer = load_planned_tokenizer(run.plan, base_folders(Path(run.plan.data.folder)))
    ends = collect_end_ids(tokenizer, make_planned_template(run.plan.data, tokenizer).end_token)
    window = find_window(AutoConfig.from_pretrained(str(merged), trust_remote_code=run.trusts_code))
    if window is not None:
        log.info(f"note: {describe_window(window)}")
    conversion = Conversion(merged=merged, expert=run.plan.expert, ends=ends, llama_cpp=arguments.llama_cpp)
    ordered = sorted(arguments.quantization or ("f16",), key=QUANTIZATIONS.index)
    files = write_files(conversion, folder, ordered, log.info)
    num_rows = _CHECKED_ROWS if arguments.check_rows is None else arguments.check_rows
    checks: list[ModelCheck] = []
    if num_rows and has_llama_cpp():
        checks = check_files(
            files,
            conversion,
            run,
            tokenizer=tokenizer,
            dtype=dtype,
            num_rows=num_rows,
            window=window,
            report=log.info,
        )
    elif num_rows:
        log.info(f"note: the files were not run, because llama-cpp-python is not installed; {INSTALL_LLAMA}")
    shutil.rmtree(merged)
    names = [file.name for file in files.values()]
    table = render_checks(checks) if checks else ()
    card = render_export_card("gguf", run, dtype, files=names, checks=table, window=window)
    write_text_atomically(folder / CARD_FILE, card)
    modelfile = render_modelfile(run.plan, run.manifest, tokenizer, names[-1], ends, window)
    write_text_atomically(folder / "Modelfile", modelfile)
    return checks, window


def _export_adapter(run: TrainedRun, target: Path, arguments: argparse.Namespace) -> dict[str, object]:  # noqa: ARG001
    """Copy the adapter with the tokenizer and chat template of the training."""
    if run.is_full:
        raise InputError("full fine-tuning has no adapter", hint="use --format merged")
    from launcher.training.export.merge import write_adapter

    with _writing(target) as scratch:
        write_adapter(scratch, run)
    return {}


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `target`, which is renamed to `target` if nothing is raised.

    An existing target is always complete and correct. Folders that killed processes left are removed.
    """
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
        try:
            folder.rename(target)
        except OSError as error:
            raise InputError(
                f"cannot create {target}: {error.strerror}", hint="choose another folder with --out"
            ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
