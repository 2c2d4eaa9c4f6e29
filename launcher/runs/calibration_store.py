"""Measured memory and speed of finished runs on this machine, and of attention backends, for later plans.

One JSON file, calibration.json in the cache folder; LAUNCHER_CALIBRATION sets another path or disables it. Delete the
file to reset. plan/calibration.py describes how plans use it.
"""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import ValidationError

from launcher.core import metrics
from launcher.core.errors import LauncherError, first_line
from launcher.core.file_lock import locked
from launcher.core.frozen_model import Frozen
from launcher.core.log import get_logger
from launcher.core.metrics import StepMetrics
from launcher.core.run_paths import RunPaths, expand_home, get_cache_folder, write_text_atomically
from launcher.core.units import bytes_to_gib
from launcher.core.versions import find_package_versions
from launcher.hardware.model import Hardware
from launcher.plan.calibration import (
    LAST_RUNS,
    NO_CALIBRATION,
    Calibration,
    MeasuredAttention,
    MeasuredRun,
    make_calibration,
    make_family,
)
from launcher.plan.estimate.memory import CONTEXT_BYTES
from launcher.plan.estimator_inputs import estimate_plan_memory, recipe_from_plan
from launcher.runs.record import RunRecord, load_record

log = get_logger(__name__)

CALIBRATION_VARIABLE = "LAUNCHER_CALIBRATION"
_FILE = "calibration.json"
_OFF = ("off", "0", "none", "no")
_WARMUP_STEPS = 3  # autotuning, caches, optimizer states
MIN_STEPS = 8
_MIN_FREE_VRAM = 0.95  # fraction of GPU memory at the start; below it, other processes used the GPU
_ALLOWED_FOREIGN_GIB = 3.0  # in use during the run, beyond torch's memory and the context: NCCL and others have buffers
# Ratios beyond these are not estimation errors: something else than planned has run.
_PLAUSIBLE_MEMORY = (0.5, 2.0)
_PLAUSIBLE_SPEED = (0.1, 10.0)
_MAX_RUNS = 1000  # in the file


class Machine(Frozen):
    """GPU and software versions; measurements are comparable if both are equal."""

    gpu: str | None  # None: no GPU
    software: dict[str, str]


class Entry(Frozen):
    """The measurements of a run, and the machine they were made on."""

    machine: Machine
    seen: MeasuredRun


class AttentionEntry(Frozen):
    """The measured times of attention backends, and the machine they were made on."""

    machine: Machine  # without the estimators, which these times do not depend on
    seen: MeasuredAttention


class CalibrationFile(Frozen):
    """Content of calibration.json."""

    schema_version: Literal[1] = 1
    entries: tuple[Entry, ...] = ()
    attention: tuple[AttentionEntry, ...] = ()


def get_calibration_file() -> Path | None:
    """Return the path of calibration.json, None if calibration is disabled."""
    configured = os.environ.get(CALIBRATION_VARIABLE, "")
    if configured.lower() in _OFF:
        return None
    return Path(expand_home(configured)) if configured else get_cache_folder() / _FILE


def load_calibration(hardware: Hardware) -> Calibration:
    """Load the calibration of this machine; it is empty for several nodes and for hardware from the catalogue.

    Several nodes use none, because each node makes the plan itself and all plans must be equal.
    """
    file = get_calibration_file()
    if file is None or hardware.source != "probe" or hardware.nodes > 1 or not file.is_file():
        return NO_CALIBRATION
    machine = describe_machine(hardware)
    try:
        known = _read(file)
    except (OSError, ValueError) as error:  # includes those of pydantic and Unicode
        log.warning(f"{file} cannot be read ({_shorten(error)}): plans use the estimates only")
        return NO_CALIBRATION
    kernels = _describe_kernels(hardware)
    return make_calibration(
        (entry.seen for entry in known.entries if entry.machine == machine),
        (entry.seen for entry in known.attention if entry.machine == kernels),
    )


def describe_machine(hardware: Hardware) -> Machine:
    """Return GPU and software versions of a machine; measurements are comparable if both are equal."""
    return Machine(gpu=None if hardware.gpu is None else hardware.gpu.key, software=_collect_software())


def _describe_kernels(hardware: Hardware) -> Machine:
    machine = describe_machine(hardware)
    software = {name: version for name, version in machine.software.items() if name != "estimators"}
    return machine.model_copy(update={"software": software})


def remember_attention(hardware: Hardware, measured: MeasuredAttention) -> str:
    """Store times of attention backends, replacing earlier ones of this shape; return the path, empty if disabled."""
    file = get_calibration_file()
    if file is None:
        return ""
    entry = AttentionEntry(machine=_describe_kernels(hardware), seen=measured)
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file):
        known = _read_or_move_aside(file)
        others = (one for one in known.attention if (one.machine, one.seen.shape) != (entry.machine, measured.shape))
        _write(file, known.model_copy(update={"attention": (*others, entry)}))
    return str(file)


@cache
def _collect_software() -> dict[str, str]:
    own = {"python": platform.python_version(), "estimators": _fingerprint_estimators()}
    return own | find_package_versions()


def _fingerprint_estimators() -> str:
    """Hash the estimators: measured ratios are only valid for the same estimates."""
    folder, digest = Path(__file__).resolve().parent.parent / "plan" / "estimate", hashlib.sha256()
    for file in (*sorted((folder / "memory").glob("*.py")), folder / "step_time.py", folder / "communication.py"):
        with suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def remember_run(paths: RunPaths) -> str:
    """Store the measurements of a finished run and return a summary; errors are logged, not raised."""
    file = get_calibration_file()
    if file is None:
        return ""
    try:
        record = load_record(paths)
        reason = find_disturbance(record)
        if reason:
            return f"speed and memory of this run are not used to calibrate later plans: {reason}"
        measured = measure_run(record)
        _add(file, Entry(machine=describe_machine(record.plan.hardware), seen=measured))
    except (OSError, LauncherError, ValueError) as error:
        log.warning(f"the measurements of this run are not stored for later plans: {_shorten(error)}")
        return ""
    return f"measured {_describe(measured)}, stored for later plans in {file}"


def find_disturbance(record: RunRecord) -> str:
    """Return why a run's measurements are not representative, empty if they are; random weights are no reason."""
    plan, outcome, steps = record.plan, record.outcome, record.steps
    if outcome is None or outcome.status != "done":
        return "it is not finished"
    if outcome.oom_fallbacks:
        return "it ran out of memory"
    if len(outcome.attempts) > 1:
        return "it was resumed"
    if plan.hardware.nodes > 1:
        return "it ran on several nodes, whose plans use the estimates only"
    if plan.profile_steps is not None:
        return "some of its steps were profiled"
    if len(steps) < MIN_STEPS:
        return f"it has fewer than {MIN_STEPS} steps"
    if steps[-1].values.get(metrics.ALLOC_RETRIES, 0.0) > 0:
        return "GPU memory was short"
    if outcome.has_cuda_graph_failed:
        return "the CUDA graph could not be captured"
    if outcome.has_compile_failed:
        return "torch.compile failed"
    backend = plan.attention.backend
    if not (outcome.attention_backend or backend).startswith(backend):
        return "another attention backend than planned was used"
    gpu = plan.hardware.gpu
    if gpu is not None:
        allowed = max(_ALLOWED_FOREIGN_GIB, (1 - _MIN_FREE_VRAM) * bytes_to_gib(gpu.memory_bytes))
        was_busy = plan.hardware.free_vram_bytes < _MIN_FREE_VRAM * gpu.memory_bytes
        if was_busy or max(map(_measure_foreign_gib, steps)) > allowed:
            return "other processes used the GPU"
    return _find_implausible(measure_run(record))


def _measure_foreign_gib(step: StepMetrics) -> float:
    """Return how much GPU memory other processes used at a step, at least; 0 if it was not measured."""
    own = step.values.get(metrics.PEAK_RESERVED_GIB, 0.0) + bytes_to_gib(CONTEXT_BYTES)
    return max(0.0, step.values.get(metrics.USED_GIB, 0.0) - own)


def _find_implausible(measured: MeasuredRun) -> str:
    for what, ratio, (low, high) in (
        ("memory", measured.memory_ratio, _PLAUSIBLE_MEMORY),
        ("speed", measured.speed_ratio, _PLAUSIBLE_SPEED),
    ):
        if ratio is not None and not low <= ratio <= high:
            return f"its {what} was {ratio:.2f} times the estimate, which is implausible"
    return ""


def measure_run(record: RunRecord) -> MeasuredRun:
    """Return measured memory and speed of a run, together with their estimates."""
    plan, steps = record.plan, record.steps
    rates = [row.values[metrics.TOKENS_PER_SECOND] for row in steps[_WARMUP_STEPS:]]
    return MeasuredRun(
        run=record.paths.run_id,
        when="" if record.outcome is None else record.outcome.ended_at or record.outcome.started_at,
        family=make_family(plan.base, recipe_from_plan(plan)),
        base=plan.base.name,
        estimated_bytes=estimate_plan_memory(plan).allocated_bytes,
        measured_bytes=_measured_bytes(record),
        estimated_tokens_per_second=plan.speed.estimated_tokens_per_second,
        measured_tokens_per_second=median(rates),
        captured=plan.cuda_graph,
    )


def _measured_bytes(record: RunRecord) -> int | None:
    """Return the peak memory of the training steps, not of evaluations, from the logged error of its prediction."""
    error = record.steps[-1].get(metrics.PREDICTION_ERROR)
    return None if error is None else round(record.plan.memory.allocated_bytes / (1.0 + error))


def _add(file: Path, entry: Entry) -> None:
    """Store a run; of its family, keep only the latest LAST_RUNS runs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file):
        known = _read_or_move_aside(file)
        others = [one for one in known.entries if (one.machine, one.seen.run) != (entry.machine, entry.seen.run)]
        alike = [one for one in others if (one.machine, one.seen.family) == (entry.machine, entry.seen.family)]
        too_old = alike[: max(0, len(alike) + 1 - LAST_RUNS)]
        kept = [one for one in others if one not in too_old][-(_MAX_RUNS - 1) :]
        _write(file, known.model_copy(update={"entries": (*kept, entry)}))


def _write(file: Path, content: CalibrationFile) -> None:
    write_text_atomically(file, content.model_dump_json(indent=1) + "\n")


def _read_or_move_aside(file: Path) -> CalibrationFile:
    if not file.is_file():
        return CalibrationFile()
    try:
        return _read(file)
    except ValueError as error:
        aside = file.with_name(f"{file.name}.unreadable")
        file.replace(aside)
        log.warning(f"{file} cannot be read ({_shorten(error)}): moved to {aside.name}, starting a new one")
        return CalibrationFile()


def _read(file: Path) -> CalibrationFile:
    return CalibrationFile.model_validate_json(file.read_text(encoding="utf-8"))


def _describe(measured: MeasuredRun) -> str:
    ratios = (("memory", measured.memory_ratio), ("speed", measured.speed_ratio))
    known = [f"{what} {100 * (ratio - 1):+.1f} % against the estimate" for what, ratio in ratios if ratio is not None]
    return ", ".join(known) or f"{measured.measured_tokens_per_second:,.0f} tokens/s"


def _shorten(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return f"{error.error_count()} problems"
    return first_line(error)
