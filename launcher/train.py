"""The script that accelerate starts: `accelerate launch launcher/train.py --manifest …`, or with `--plan …`."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

# accelerate puts this file's folder first on sys.path, where our module names could shadow other packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

# Modules that import torch are imported in functions: user errors are reported before that takes seconds.
from launcher.core.errors import ExitCode, InputError, LauncherError, ManifestError, first_line  # noqa: E402
from launcher.core.file_lock import lock_run  # noqa: E402
from launcher.core.installation import explain_missing_module  # noqa: E402
from launcher.core.log import configure, get_logger  # noqa: E402
from launcher.core.processes import is_lost_rank  # noqa: E402
from launcher.core.run_paths import RunPaths, expand_home, format_resume_command, open_run, write_files  # noqa: E402
from launcher.hardware.launch_env import LaunchEnv, read_launch_env  # noqa: E402
from launcher.manifest import find_manifest, list_experts, load_manifest  # noqa: E402
from launcher.manifest.trust import (  # noqa: E402
    check_trust,
    grant_trust,
    list_code,
    list_judge_code,
    list_remote_code,
)
from launcher.plan import Plan, load_plan  # noqa: E402
from launcher.request.arguments import (  # noqa: E402
    add_failure_arguments,
    add_learning_arguments,
    add_profiler_arguments,
    add_resume_arguments,
    add_tracker_arguments,
    add_trust_argument,
    make_learning_request,
)
from launcher.training.runtime.parent_watch import exit_with_parent  # noqa: E402
from launcher.training.runtime.process_output import (  # noqa: E402
    limit_thread_spinning,
    redact_output,
    silence_libraries,
)
from launcher.training.runtime.startup_timer import startup  # noqa: E402
from launcher.training.runtime.unused_packages import hide_unused_packages  # noqa: E402

if TYPE_CHECKING:
    from launcher.training.checkpoint.resume import ResumeOptions
    from launcher.training.runtime.run_record import RunRecorder

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says, and return the exit code."""
    limit_thread_spinning()
    redact_output()
    configure()
    arguments = make_parser().parse_args(argv)
    recorder: RunRecorder | None = None
    try:
        exit_with_parent(outlives_agent=True)  # first, so that a parent that dies during start-up is noticed
        if arguments.trust:
            grant_trust()
        plan, paths = _read_plan(arguments.plan) if arguments.plan else _plan_bare_launch(arguments)
        _check_trust(arguments, plan, paths)
        from launcher.training.cluster.node_diff import list_used_packages

        if not plan.trust_remote_code:  # code of a base model may need any package
            hide_unused_packages(list_used_packages(plan))
        silence_libraries()
        gc.disable()  # collections would take an eighth of the time of the imports
        import launcher.training.trainer  # noqa: F401
        from launcher.training.checkpoint.resume import ResumeOptions
        from launcher.training.runtime.run_record import RunRecorder

        gc.freeze()  # what was imported stays: later collections do not scan it
        gc.enable()
        startup.end_phase("imports")
        if _is_main():
            lock_run(paths)
        recorder = RunRecorder(paths, is_main=_is_main())
        if recorder.was_done and not arguments.allow_changed_inputs:
            _log_once(f"{paths.root}: this run is done; its adapter: {paths.adapter}")
            return int(ExitCode.DONE)
        options = ResumeOptions(allow_changed_inputs=arguments.allow_changed_inputs, verify_steps=arguments.verify)
        return train_planned(plan, paths, recorder, options)
    except LauncherError as error:
        return _fail(recorder, int(error.exit_code), str(error))
    except KeyboardInterrupt as error:
        message = str(error) or "stopped immediately: steps since the last checkpoint are not saved"
        return _fail(recorder, int(ExitCode.PREEMPTED), message, status="stopped")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (missing := explain_missing_module(error, "training")):
            return _fail(recorder, int(missing.exit_code), str(missing))
        if is_out_of_memory(error):
            from launcher.training.oom import format_oom_error

            last_plan, _ = _read_plan(paths.plan)  # fallbacks may have changed it
            return _fail(recorder, int(ExitCode.DOES_NOT_FIT), format_oom_error(error, last_plan))
        if is_lost_rank(error):
            return _fail(recorder, int(ExitCode.RUN_FAILED), f"another rank was lost: {first_line(error)}")
        if is_lost_worker(error):
            return _fail(recorder, int(ExitCode.RUN_FAILED), f"a data loader worker died: {first_line(error)}")
        if not _is_main():  # rank 0 may never learn of it
            log.error(traceback.format_exc())
        return _fail(recorder, int(ExitCode.BUG), traceback.format_exc())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with a message on how accelerate starts this script."""
        hint = "accelerate decides where it runs, by --config_file (presets: accelerate_configs/); --gpu, --strategy "
        hint += "and --on are flags of `launcher train`; launcher/train.py --help lists those of this script"
        if "--plan --manifest" in message:
            message, hint = "no expert given: add --manifest EXPERT", f"known experts: {', '.join(list_experts())}; "
            hint += "accelerate launch --config_file accelerate_configs/cpu.yaml launcher/train.py --manifest json"
        if _is_main():
            log.error(InputError(f"launcher/train.py: {message}", hint=hint))
        sys.exit(int(ExitCode.WRONG_INPUT))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this script."""
    parser = _Parser(prog="launcher/train.py", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", type=_parse_path, metavar="FILE", help="a plan written by `launcher train`")
    source.add_argument(
        "--manifest",
        type=expand_home,
        metavar="EXPERT",
        help="an expert by name, or a manifest, planned for the processes that accelerate started",
    )
    add_trust_argument(parser)
    add_learning_arguments(parser)
    add_tracker_arguments(parser)
    add_failure_arguments(parser)
    add_profiler_arguments(parser)
    add_resume_arguments(parser)
    run = parser.add_argument_group("the run, with --manifest")
    run.add_argument("--run-id", metavar="ID", help="name of the run directory (default: expert, time, hardware)")
    run.add_argument("--runs-dir", type=_parse_path, metavar="DIR", default=Path("runs"), help="default: runs")
    return parser


def _parse_path(text: str) -> Path:
    return Path(expand_home(text))


def _read_plan(file: Path) -> tuple[Plan, RunPaths]:
    return load_plan(file), open_run(file.parent)


def _plan_bare_launch(arguments: argparse.Namespace) -> tuple[Plan, RunPaths]:
    """Plan a run for the processes that accelerate started; return the plan and the new run directory's paths."""
    started = read_launch_env(os.environ)
    if started.num_ranks == 1:
        return _make_plan(arguments, started)
    from launcher.training.runtime.rendezvous import broadcast_plan

    return broadcast_plan(lambda: _make_plan(arguments, started), started.rank, started.num_ranks)


def _make_plan(arguments: argparse.Namespace, started: LaunchEnv) -> tuple[Plan, RunPaths]:
    from launcher.request.request import adapt_to_launch, load_request, merge_requests, plan_request
    from launcher.request.run_directory import create_run_directory, find_run_to_resume, input_texts

    request = make_learning_request(arguments, arguments.manifest)
    paths = None
    if arguments.resume is not None:
        paths = find_run_to_resume(arguments.runs_dir, arguments.resume, arguments.manifest)
        request = merge_requests(load_request(paths.request), request)
    # What accelerate started is not part of the saved request: the next launch may start something else.
    planned = replace(plan_request(adapt_to_launch(request, started)), request=request)
    check_trust(list_code(planned.loaded.manifest), planned.loaded.path if paths is None else paths.root)
    paths = paths or create_run_directory(planned, arguments.runs_dir, arguments.run_id)
    write_files(paths.root, input_texts(planned, paths))
    return planned.plan, paths


def _check_trust(arguments: argparse.Namespace, plan: Plan, paths: RunPaths) -> None:
    """Raise if a run executes untrusted code of a model or judge. A new run is as trusted as its manifest."""
    is_new = arguments.plan is None and arguments.resume is None
    source = find_manifest(arguments.manifest) if is_new else paths.root
    code = list_remote_code(plan.trust_remote_code, plan.base.name)
    if plan.task_eval is not None:
        with suppress(ManifestError):  # then there is no task evaluation
            code += list_judge_code(load_manifest(paths.manifest).manifest)
    check_trust(code, source)
    if arguments.plan is not None:  # --resume checks it where it finds the run
        from launcher.request.run_directory import check_links

        check_links(paths)


def train_planned(plan: Plan, paths: RunPaths, recorder: RunRecorder, options: ResumeOptions) -> int:
    """Prepare the data, train, and record the result; return the exit code.

    Data is prepared before there is a process group: the first process prepares, the others wait for its lock.
    """
    from launcher.corpus.prepare import prepare
    from launcher.corpus.spec import PreparationSpec, make_preparation_spec
    from launcher.corpus.tokenizer import load_planned_tokenizer
    from launcher.request.request import base_folders
    from launcher.training.cluster.preflight import check_nodes

    folder = Path(plan.data.folder)

    def describe_data() -> PreparationSpec:
        tokenizer = load_planned_tokenizer(plan, base_folders(folder))
        return make_preparation_spec(plan, folder, tokenizer)

    preparation = check_nodes(plan, paths, recorder, describe_data)
    prepared = prepare(preparation, _log_once, lambda _rows: None)
    from launcher.training.trainer import TrainerInputs, run_training

    inputs = TrainerInputs(
        plan=plan,
        paths=paths,
        store=prepared.store,
        folders=base_folders(folder),
        vocab_size=preparation.tokenizer.backend.get_vocab_size(with_added_tokens=True),
        options=options,
        preparation=preparation,
        shared_system=prepared.store.audit.splits["train"].shared_system,
    )
    startup.end_phase("data")
    result = run_training(inputs, recorder)
    if result.was_interrupted:
        checkpoint = paths.checkpoint(result.steps_done)
        command = format_resume_command(paths.root)
        message = f"stopped by a signal after step {result.steps_done:,}; `{command}` continues from {checkpoint}"
        _log_once(message)
        recorder.finish(status="stopped", exit_code=int(ExitCode.PREEMPTED), error=message)
        return int(ExitCode.PREEMPTED)
    recorder.finish(status="done", exit_code=int(ExitCode.DONE))
    if _is_main():
        from launcher.runs.calibration_store import remember_run

        measured = remember_run(paths)
        if measured:
            log.info(measured)
    _log_once(f"adapter  {paths.adapter}\nmetrics  {paths.metrics}\nrecord   {paths.outcome}\nreport   {paths.report}")
    return int(ExitCode.DONE)


def is_out_of_memory(error: Exception) -> bool:
    """Whether this is an out-of-memory error of torch, by name as torch may not be imported, or of a CUDA library."""
    texts = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'")
    is_named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return is_named or any(text in str(error) for text in texts)


def is_lost_worker(error: Exception) -> bool:
    """Whether a data loader worker died; torch raises this anywhere in the main process."""
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


def _fail(recorder: RunRecorder | None, code: int, message: str, status: str = "failed") -> int:
    """Print the error message on rank 0, then record it in outcome.json, and return the exit code."""
    if message and _is_main():
        log.error(message)
    if recorder is not None:
        recorder.finish(status=status, exit_code=code, error=message)
    return code


def _log_once(text: str) -> None:
    """Log a message on rank 0 only."""
    if _is_main():
        log.info(text)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def run() -> NoReturn:
    """Train, and end the process without taking apart its modules.

    That saves 0.2 s, and ranks cannot abort in torch's static destructors, where threads of a process group may still
    run.
    """
    exit_codes: list[int] = []
    atexit.register(_end_process, exit_codes)  # runs last, after the exit handlers of libraries imported later
    exit_codes.append(main())
    if exit_codes[0] in (ExitCode.DONE, ExitCode.PREEMPTED):  # after a failure, other ranks may not answer
        _leave_process_group()
    sys.exit(exit_codes[0])


def _leave_process_group() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        with suppress(Exception):  # the training has ended: its exit code stays
            torch.distributed.destroy_process_group()


def _end_process(codes: Sequence[int]) -> None:
    """End this process with the exit code in `codes`; return if `codes` is empty, because main() raised."""
    if not codes:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its reader is gone
            stream.flush()
    os._exit(codes[0])


if __name__ == "__main__":
    run()
