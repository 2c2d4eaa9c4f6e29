"""`launcher eval`: judge an expert's answers to held-out rows with parsers, compilers and databases."""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.environment import name_variable
from launcher.cli.run_lookup import (
    add_runs_dir,
    find_finished_run,
    find_run,
    load_expert_name,
    resolve_expert_name,
)
from launcher.cli.tables import make_console, print_json, print_table
from launcher.core.errors import ExitCode, InputError, escape
from launcher.core.log import get_logger
from launcher.core.output_path import check_output_file
from launcher.core.run_paths import expand_home
from launcher.core.units import format_percent
from launcher.request.flag_types import percentage, positive_int

if TYPE_CHECKING:
    from launcher.core.run_paths import RunPaths
    from launcher.judges.gate import GateVerdict
    from launcher.judges.results import AnswerResult, EvalResult

log = get_logger(__name__)

DEFAULT_MAX_REGRESSION = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an evaluation."""
    parser.add_argument(
        "expert",
        type=expand_home,
        metavar="EXPERT",
        nargs="?",
        help="an expert by name, or a manifest (default: the run's)",
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--run",
        type=expand_home,
        metavar="RUN",
        help="a run by id or directory (default: the expert's newest finished run)",
    )
    target.add_argument("--adapter", type=expand_home, metavar="DIR", help="an adapter in PEFT format")
    target.add_argument("--base", action="store_true", help="the base model without an adapter")
    add_runs_dir(parser)
    parser.add_argument("--profile", choices=("auto", "full", "smoke"), default="auto", help="with --adapter or --base")
    rows = parser.add_argument_group("rows")
    rows.add_argument("--rows", type=positive_int, metavar="N", help="evaluate a fixed subset of N rows (default: all)")
    rows.add_argument(
        "--split", choices=("test", "validation"), help="default: test, or validation if there is no test split"
    )
    rows.add_argument(
        "--batch-size",
        type=positive_int,
        metavar="N",
        help="answers per batch (default: what the free GPU memory allows; 16 on a CPU)",
    )
    rows.add_argument(
        "--max-new-tokens",
        type=positive_int,
        metavar="N",
        help="longest answer (default: 512, or more for rows with a longer reference answer)",
    )
    gate = parser.add_argument_group("gate")
    gate.add_argument(
        "--against",
        type=expand_home,
        metavar="RUN|FILE",
        help="compare with an earlier evaluation: a run, or a file written by -o",
    )
    gate.add_argument(
        "--max-regression",
        type=percentage,
        metavar="P%",
        help="largest allowed drop in correct answers, in percentage points (default 5%%)",
    )
    parser.add_argument(
        "-o", "--output", type=expand_home, metavar="FILE", help="also write every answer with its verdict to FILE"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--worst", type=positive_int, default=5, metavar="N", help="number of failures shown (default 5)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Evaluate an expert; return QUALITY_GATE if it is worse than --against by more than --max-regression allows."""
    before = _load_earlier(arguments) if arguments.against else None  # fail before the evaluation
    if arguments.max_regression is not None and before is None:
        raise InputError("--max-regression requires --against")
    file = None if arguments.output is None else check_output_file(arguments.output, "--output")
    code, now = _evaluate(arguments, file)
    if now is None:
        return code
    limit = DEFAULT_MAX_REGRESSION if arguments.max_regression is None else arguments.max_regression
    gate, warnings = apply_gate(now, before, limit)
    if arguments.json:
        print_result_as_json(now, gate, warnings)
    else:
        print_result(now, arguments.worst)
        if gate is not None and before is not None:
            print_gate(now, before, gate, warnings)
    return ExitCode.DONE if gate is None or gate.is_open else ExitCode.QUALITY_GATE


def _evaluate(arguments: argparse.Namespace, file: Path | None) -> tuple[int, EvalResult | None]:
    from launcher.cli.torch_subcommands import run_module
    from launcher.judges.results import load_result

    paths = _find_target_run(arguments)
    if paths is not None and arguments.profile != "auto" and not os.environ.get(name_variable("--profile")):
        raise InputError(
            f"--profile {arguments.profile} has no effect: {paths.root} is evaluated with the profile of its training",
            hint="--profile is for --adapter and --base",
        )
    words = [] if paths is None else [f"--run={paths.root}"]
    words += [f"--expert={arguments.expert}"] if arguments.expert is not None else []
    words += [f"--adapter={arguments.adapter}"] if arguments.adapter else []
    words += [f"--profile={arguments.profile}", *(["--json"] if arguments.json else [])]
    for name in ("rows", "split", "batch_size", "max_new_tokens"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "eval.json"
        code = run_module("launcher.training.inference.eval", [*words, f"--out={scratch}", "--quiet"])
        if code != 0:
            return code, None
        result = load_result(scratch)
    _save(result, file, paths)
    return 0, result


def _save(result: EvalResult, file: Path | None, paths: RunPaths | None) -> None:
    """Save an evaluation in the run directory, where it never replaces one that covers more, and to a file."""
    from launcher.core.run_paths import write_text_atomically

    text = result.model_dump_json(indent=1) + "\n"
    names_run = paths is not None and file is not None and file.resolve() == paths.evaluation.resolve()
    if paths is not None and not names_run:
        lost = _find_lost_coverage(result, paths)
        write_text_atomically(paths.partial_evaluation if lost else paths.evaluation, text)
        if lost:
            log.info(
                f"note: {paths.evaluation} was kept, because it covers more: {', '.join(lost)}; this evaluation is in "
                f"{paths.partial_evaluation}\n"
                f"hint: {shlex.join(('mv', str(paths.partial_evaluation), str(paths.evaluation)))} replaces it"
            )
    if file is not None:
        write_text_atomically(file, text)


def _find_lost_coverage(result: EvalResult, paths: RunPaths) -> tuple[str, ...]:
    """Return what an evaluation covers less than the one in the run directory; nothing if that one is of no use."""
    from launcher.judges.results import find_lost_coverage, load_result
    from launcher.runs.evaluations import is_outdated
    from launcher.runs.record import load_outcome

    try:
        before = load_result(paths.evaluation)
    except InputError:  # there is none, or it is damaged
        return ()
    return () if is_outdated(load_outcome(paths.outcome), before) else find_lost_coverage(before, result)


def _find_target_run(arguments: argparse.Namespace) -> RunPaths | None:
    """Return the run to evaluate; None for an adapter or a base model."""
    runs_dir = Path(arguments.runs_dir)
    expert = None if arguments.expert is None else resolve_expert_name(arguments.expert)
    if arguments.run is not None:
        paths = find_run(arguments.run, runs_dir)
        trained = load_expert_name(paths)
        if expert is not None and trained not in (None, expert):
            raise InputError(
                f"{paths.root} is a run of {trained}, not of {expert}", hint="omit the expert, or choose another run"
            )
        return paths
    if arguments.expert is None:
        raise InputError("no expert and no run given", hint="launcher eval neo4j, or launcher eval --run RUN")
    if arguments.adapter or arguments.base:
        return None
    hint = "choose a run with --run, an adapter with --adapter DIR, or evaluate the base model with --base"
    return find_finished_run(arguments.expert, runs_dir, hint)


def _load_earlier(arguments: argparse.Namespace) -> EvalResult:
    from launcher.judges.results import load_result

    if Path(arguments.against).is_file():
        return load_result(Path(arguments.against))
    paths = find_run(arguments.against, Path(arguments.runs_dir))
    if not paths.evaluation.is_file():
        raise InputError(
            f"{arguments.against} has no evaluation",
            hint=f"evaluate it first, on the same rows: launcher eval --run {arguments.against}",
        )
    return load_result(paths.evaluation)


_SHOWN = 400  # characters of a text


def print_result(now: EvalResult, num_worst: int) -> None:
    """Print an evaluation as a table, with its worst answers."""
    rate = len(now.answers) / max(1e-9, now.seconds)
    print(
        f"{escape(now.expert)}, {escape(now.subject)}: {len(now.answers)} of {now.num_rows} {now.split} rows "
        f"({escape(now.source)}), {rate:.1f} examples/s\n"
    )
    print_table(("check", "correct", "95 %", "of", "judged by"), list(_rows(now)), ("bold",))
    if now.num_chats:
        print(f"note: {now.num_chats:,} of the rows are chats with several answers: only the first answer is judged")
    if now.num_cut:
        print(f"note: {now.num_cut:,} answers were truncated, because they reached the limit of new tokens")
    for line in _worst(now, num_worst):
        make_console().print(line, markup=False, soft_wrap=True)


def print_gate(now: EvalResult, before: EvalResult, gate: GateVerdict, warnings: Sequence[str]) -> None:
    """Print the result of the quality gate."""
    print(f"\nagainst {escape(before.subject)} ({format_percent(before.main.rate)} {now.main_check}):")
    for warning in warnings:
        print(f"  note: {escape(warning)}")
    print(f"  quality gate {'passed' if gate.is_open else 'FAILED'}: {gate.message}")


def print_result_as_json(now: EvalResult, gate: GateVerdict | None, warnings: Sequence[str]) -> None:
    """Print an evaluation and the result of the quality gate, if any, as JSON."""
    content = now.model_dump(mode="json")
    if gate is not None:
        content["gate"] = {"is_open": gate.is_open, "words": gate.message, "notes": list(warnings)}
    print_json(content)


def apply_gate(
    now: EvalResult, before: EvalResult | None, max_regression: float
) -> tuple[GateVerdict | None, tuple[str, ...]]:
    """Return the verdict of the quality gate and warnings; None without an earlier evaluation."""
    if before is None:
        return None, ()
    from launcher.judges.gate import check_change
    from launcher.judges.results import compare_results

    change, warnings = compare_results(before, now)
    return check_change(change, max_regression), warnings


def _rows(result: EvalResult) -> Iterator[tuple[str, ...]]:
    from launcher.judges.results import NOT_CHECKED

    for check in result.checks:
        mark = " (main)" if check.name == result.main_check else ""
        if check.num_judged == 0:
            yield f"{check.title}{mark}", NOT_CHECKED, "", "0", check.checker
            continue
        interval = f"{format_percent(check.low)} to {format_percent(check.high)}"
        yield f"{check.title}{mark}", format_percent(check.rate), interval, f"{check.num_judged}", check.checker


def _worst(result: EvalResult, count: int) -> Iterator[str]:
    """Yield lines that show the worst answers: those that fail the least strict checks."""
    names = [check.name for check in result.checks]

    def first_failed(answer: AnswerResult) -> int:
        return next((index for index, name in enumerate(names) if answer.checks.get(name) is False), len(names))

    failed = sorted((answer for answer in result.answers if first_failed(answer) < len(names)), key=first_failed)
    if failed:
        yield f"\n{len(failed)} answer{' fails' if len(failed) == 1 else 's fail'} a check; the worst:"
    for answer in failed[:count]:
        yield f"\n  question {_shorten(answer.instruction)}"
        yield f"  answer   {_shorten(answer.answer) or '(empty)'}"
        yield f"  expected {_shorten(answer.reference)}"
        cut = " (truncated at --max-new-tokens)" if answer.end == "length" else ""
        yield f"  reason   {_shorten(answer.reason)}{cut}"


def _shorten(text: str) -> str:
    flat = escape(" ".join(text.split()))
    return flat if len(flat) <= _SHOWN else f"{flat[: _SHOWN - 1]}…"
