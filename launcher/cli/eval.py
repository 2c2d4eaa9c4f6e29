"""`launcher eval`: an expert answers held-out rows; real parsers, compilers and databases judge; and a gate."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.arguments import positive
from launcher.cli.finding import add_runs_dir, find_run, list_runs, name_expert
from launcher.errors import ExitCode, InputError, say

if TYPE_CHECKING:
    from launcher.paths import RunPaths
    from launcher.quality.results import EvalResult

HELP = "judge an expert's answers to held-out rows; --against is a gate"
DEFAULT_DROP = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "expert", metavar="EXPERT", nargs="?", help="an expert by name, or a manifest (default: the run's)"
    )
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--run", metavar="RUN", help="a run by id or directory (default: the expert's newest that is done)"
    )
    who.add_argument("--adapter", metavar="DIR", help="an adapter in PEFT's format, from elsewhere")
    who.add_argument("--base", action="store_true", help="the base without any adapter")
    add_runs_dir(parser)
    parser.add_argument("--profile", choices=("auto", "full", "smoke"), default="auto", help="with --adapter or --base")
    rows = parser.add_argument_group("what is asked")
    rows.add_argument("--rows", type=positive, metavar="N", help="a slice that stays the same (default: all)")
    rows.add_argument(
        "--split", choices=("test", "validation"), help="default: test, or validation where it is missing"
    )
    rows.add_argument("--batch-size", type=positive, metavar="N", help="answers at a time (default 64, 16 on a CPU)")
    rows.add_argument("--max-new-tokens", type=positive, metavar="N", help="longest answer (default 512)")
    gate = parser.add_argument_group("the gate")
    gate.add_argument("--against", metavar="RUN|FILE", help="an earlier evaluation: of a run, or a file that -o wrote")
    gate.add_argument(
        "--max-drop", type=share, metavar="P%", help="what may be lost: of a hundred rows so many (default 5%%)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="also write every answer with its verdict")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--worst", type=positive, default=5, metavar="N", help="how many failures are shown (default 5)"
    )


def run(arguments: argparse.Namespace) -> int:
    from launcher.cli.show_eval import print_json, print_result

    before = _load_earlier(arguments) if arguments.against else None  # before anybody waits
    if arguments.max_drop is not None and before is None:
        raise InputError("--max-drop says how much may be lost, and --against is missing: lost against what?")
    code, now = _evaluate(arguments)
    if now is None:
        return code
    drop = DEFAULT_DROP if arguments.max_drop is None else arguments.max_drop
    show = print_json if arguments.json else print_result
    return ExitCode.DONE if show(now, before, drop, arguments.worst) else ExitCode.QUALITY_GATE


def _evaluate(arguments: argparse.Namespace) -> tuple[int, EvalResult | None]:
    from launcher.cli.torch_verbs import run_module
    from launcher.quality.results import load_result

    paths = _find_subject(arguments)
    words = [f"--run={paths.root}"] if paths is not None else [f"--expert={arguments.expert}"]
    words += [f"--adapter={arguments.adapter}"] if arguments.adapter else []
    words += [f"--profile={arguments.profile}"]
    for name in ("rows", "split", "batch_size", "max_new_tokens"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "eval.json"
        code = run_module("launcher.training.grading", [*words, f"--out={scratch}", "--quiet"])
        if code != 0:
            return code, None
        result = load_result(scratch)
    _keep(result, arguments, paths)
    return 0, result


def _keep(result: EvalResult, arguments: argparse.Namespace, paths: RunPaths | None) -> None:
    """In the run's directory, where a later gate finds it; and where the user wants it."""
    from launcher.paths import write_text_atomically
    from launcher.quality.results import load_result

    text = result.model_dump_json(indent=1) + "\n"
    if paths is not None:
        before = load_result(paths.evaluation) if paths.evaluation.is_file() else None
        if before is None or before.split != result.split or len(before.answers) <= len(result.answers):
            write_text_atomically(paths.evaluation, text)
        else:
            told = f"{len(before.answers):,} answers, these are {len(result.answers):,}"
            say(f"note: the earlier evaluation in {paths.evaluation} stays: it has {told}; -o FILE keeps these")
    if arguments.output:
        write_text_atomically(Path(arguments.output), text)


def _find_subject(arguments: argparse.Namespace) -> RunPaths | None:
    """The run whose expert is asked; None: an adapter or a base."""
    runs_dir = Path(arguments.runs_dir)
    wanted = None if arguments.expert is None else name_expert(arguments.expert)
    if arguments.run is not None:
        paths = find_run(arguments.run, runs_dir)
        trained = _expert_of(paths)
        if wanted is not None and trained not in (None, wanted):
            raise InputError(
                f"{paths.root} is a run of {trained}, not of {wanted}", hint="leave the expert out, or name another run"
            )
        return paths
    if arguments.expert is None:
        raise InputError("neither an expert nor a run is named", hint="launcher eval neo4j, or launcher eval --run RUN")
    if arguments.adapter or arguments.base:
        return None
    from launcher.record import load_outcome

    for paths in list_runs(runs_dir):
        outcome = load_outcome(paths.outcome)
        if outcome is not None and outcome.status == "done" and _expert_of(paths) == wanted:
            return paths
    raise InputError(
        f"no run of {wanted} in {runs_dir} is done",
        hint="--run RUN names one, --adapter DIR an adapter from elsewhere, --base asks the base alone",
    )


def _expert_of(paths: RunPaths) -> str | None:
    from launcher.plan import load_plan

    try:
        return load_plan(paths.plan).expert
    except InputError:
        return None


def _load_earlier(arguments: argparse.Namespace) -> EvalResult:
    from launcher.quality.results import load_result

    if Path(arguments.against).is_file():
        return load_result(Path(arguments.against))
    paths = find_run(arguments.against, Path(arguments.runs_dir))
    if not paths.evaluation.is_file():
        raise InputError(
            f"{arguments.against} was never evaluated",
            hint=f"launcher eval --run {arguments.against}, with the same rows",
        )
    return load_result(paths.evaluation)


def share(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a share such as 5%")
    return value
