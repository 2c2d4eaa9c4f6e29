"""The script that accelerate starts: `accelerate launch launcher/train.py --manifest …`, or with `--plan …`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

# accelerate puts this file's folder first on sys.path, where our module names could capture other packages' imports.
# The package's parent is what belongs there.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launcher.arguments import (  # noqa: E402
    add_guard_arguments,
    add_learning_arguments,
    add_profile_arguments,
    add_resume_arguments,
    add_wandb_arguments,
    make_learning_request,
)
from launcher.errors import ExitCode, LauncherError, first_line  # noqa: E402
from launcher.started import Started, find_started  # noqa: E402

if TYPE_CHECKING:
    from launcher.paths import RunPaths
    from launcher.plan import Plan
    from launcher.training.chronicle import Chronicle
    from launcher.training.resuming import ResumeOptions


def main(argv: Sequence[str] | None = None) -> int:
    from launcher.training.quiet import calm_threads, hide_secrets, silence_libraries

    calm_threads()
    hide_secrets()
    arguments = make_parser().parse_args(argv)
    chronicle: Chronicle | None = None
    try:
        from launcher.training.guards import end_with_parents

        end_with_parents()  # before anything takes time: whoever dies meanwhile would not be missed
        plan, paths = read_plan(arguments.plan) if arguments.plan else plan_for_here(arguments)
        from launcher.locking import lock_run
        from launcher.training.chronicle import Chronicle
        from launcher.training.resuming import make_resume_options

        silence_libraries()
        if is_main():
            lock_run(paths)
        chronicle = Chronicle(paths, is_main=is_main())
        if chronicle.was_done and not arguments.allow_drift:
            say(f"{paths.root}: this run is done; its adapter: {paths.adapter}")
            return int(ExitCode.DONE)
        code = train_planned(plan, paths, chronicle, make_resume_options(arguments))
    except LauncherError as error:
        return tell(chronicle, "failed", int(error.exit_code), str(error))
    except KeyboardInterrupt:
        return tell(chronicle, "stopped", int(ExitCode.PREEMPTED), "stopped at once: the step in work was not finished")
    except Exception as error:
        if is_out_of_memory(error):
            from launcher.training.descending import explain_full_card

            lowest, _ = read_plan(paths.plan)  # rungs may have been taken since
            return tell(chronicle, "failed", int(ExitCode.DOES_NOT_FIT), explain_full_card(error, lowest))
        if is_lost_rank(error):
            return tell(chronicle, "failed", int(ExitCode.RUN_FAILED), f"another rank was lost: {first_line(error)}")
        if is_lost_worker(error):
            return tell(chronicle, "failed", int(ExitCode.RUN_FAILED), f"a data worker died: {first_line(error)}")
        if not is_main():  # the first rank may never learn of it
            print(f"error on rank {os.environ['RANK']}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        return tell(chronicle, "failed", int(ExitCode.BUG), traceback.format_exc())
    return code


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launcher/train.py", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", type=Path, metavar="FILE", help="a plan that `launcher train` wrote")
    source.add_argument("--manifest", metavar="FILE", help="a manifest, planned for what accelerate started")
    add_learning_arguments(parser)
    add_wandb_arguments(parser)
    add_guard_arguments(parser)
    add_profile_arguments(parser)
    add_resume_arguments(parser)
    run = parser.add_argument_group("the run, with --manifest")
    run.add_argument("--run-id", metavar="ID", help="name of the run directory (default: expert, time, hardware)")
    run.add_argument("--runs-dir", type=Path, metavar="DIR", default=Path("runs"), help="default: runs")
    return parser


def read_plan(file: Path) -> tuple[Plan, RunPaths]:
    from launcher.paths import RunPaths
    from launcher.plan import load_plan

    return load_plan(file), RunPaths(file.parent)


def plan_for_here(arguments: argparse.Namespace) -> tuple[Plan, RunPaths]:
    """A bare launch: the plan is made for what accelerate started, in a run directory of its own."""
    started = find_started(os.environ)
    if started.num_ranks == 1:
        return decide(arguments, started)
    from launcher.training.sharing import decide_once

    return decide_once(lambda: decide(arguments, started), started.rank, started.num_ranks)


def decide(arguments: argparse.Namespace, started: Started) -> tuple[Plan, RunPaths]:
    from launcher.inputs import for_started, load_request, merge_requests, plan_request
    from launcher.paths import write_files
    from launcher.runs import create_run_directory, find_run_to_resume, input_texts

    request = make_learning_request(arguments, arguments.manifest)
    paths = None
    if arguments.resume is not None:
        paths = find_run_to_resume(arguments.runs_dir, arguments.resume, arguments.manifest)
        request = merge_requests(load_request(paths.request), request)
    # What accelerate started is no part of the request: another launch may start something else.
    planned = replace(plan_request(for_started(request, started)), request=request)
    paths = paths or create_run_directory(planned, arguments.runs_dir, arguments.run_id)
    write_files(paths.root, input_texts(planned, paths))
    return planned.plan, paths


def train_planned(plan: Plan, paths: RunPaths, chronicle: Chronicle, options: ResumeOptions) -> int:
    """Prepares before any process group exists: whoever comes first prepares, the others wait for its lock."""
    from launcher.corpus.preparation import Preparation, make_preparation
    from launcher.corpus.prepare import prepare
    from launcher.corpus.tokenizer import load_tokenizer
    from launcher.inputs import base_folders
    from launcher.training.preflight import check_nodes

    folder = Path(plan.data.folder)

    def find_data() -> Preparation:
        tokenizer = load_tokenizer(plan.base.name, base_folders(folder), any_will_do=plan.random_weights)
        return make_preparation(plan, folder, tokenizer)

    wanted = check_nodes(plan, paths, chronicle, find_data)
    prepared = prepare(wanted, say, lambda _rows: None)
    from launcher.training.session import Task, run_training

    task = Task(
        plan=plan,
        paths=paths,
        store=prepared.store,
        folders=base_folders(folder),
        vocab_size=wanted.tokenizer.backend.get_vocab_size(with_added_tokens=True),
        options=options,
        preparation=wanted,
    )
    ending = run_training(task, chronicle)
    if ending.was_cut:
        where = paths.checkpoint(ending.steps_done)
        message = f"stopped by a signal after step {ending.steps_done:,}; --resume goes on from {where}"
        say(message)
        chronicle.end(status="stopped", exit_code=int(ExitCode.PREEMPTED), error=message)
        return int(ExitCode.PREEMPTED)
    chronicle.end(status="done", exit_code=int(ExitCode.DONE))
    if is_main():
        from launcher.calibration import remember_run

        learnt = remember_run(paths)
        if learnt:
            say(f"measured {learnt}")
    say(f"adapter  {paths.adapter}\nmetrics  {paths.metrics}\nrecord   {paths.outcome}\nreport   {paths.report}")
    return int(ExitCode.DONE)


def is_out_of_memory(error: Exception) -> bool:
    """torch's, which may not be imported yet, one of ours made of it, or what libraries below torch say for it."""
    words = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'")
    is_named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return is_named or any(word in str(error) for word in words)


def is_lost_rank(error: Exception) -> bool:
    """A collective that failed because somebody else is gone; torch has no one class for it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    words = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "unhandled system error")
    return type(error).__name__.startswith("Dist") or any(word in str(error) for word in words)


def is_lost_worker(error: Exception) -> bool:
    """torch raises it wherever the training is when the worker's end is noticed."""
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


def tell(chronicle: Chronicle | None, status: str, code: int, message: str) -> int:
    """The message first, the record after it: whoever waits for the record has seen the message."""
    if message:
        say(f"error: {message}")
    if chronicle is not None:
        chronicle.end(status=status, exit_code=code, error=message)
    return code


def say(text: str) -> None:
    if is_main():
        print(text, file=sys.stderr, flush=True)


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
