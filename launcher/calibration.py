"""What finished runs of this machine measured, against what was estimated: kept in a file, and handed to later plans.

One JSON file, calibration.json beside experience.json; LAUNCHER_CALIBRATION names another, or switches it off. Delete
it, and everything is forgotten. How far a plan goes by it is told in plan/calibration.py.
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

from launcher import metrics
from launcher.errors import LauncherError, first_line, say
from launcher.experience import find_cache_folder
from launcher.hardware import Hardware
from launcher.locking import locked
from launcher.paths import RunPaths, write_text_atomically
from launcher.plan.calibration import LAST_RUNS, NOTHING_LEARNT, Calibration, Seen, make_calibration, name_family
from launcher.plan.recipes import estimate_plan, recipe_of
from launcher.record import RunRecord, load_record
from launcher.values import Frozen
from launcher.versions import find_package_versions

CALIBRATION_VARIABLE = "LAUNCHER_CALIBRATION"
_FILE = "calibration.json"
_OFF = ("off", "0", "none", "no")
_WARM_STEPS = 3  # kernels are picked, caches filled, the optimizer makes its states
_FEWEST_STEPS = 8
_FREE_SHARE = 0.95  # of the card, when the run began: else others used it, too
# Beyond these it is not the estimate that is wrong: something else ran than what was planned.
_LIKELY_MEMORY = (0.5, 2.0)
_LIKELY_SPEED = (0.1, 10.0)
_MOST_RUNS = 1000  # in the file


class Machine(Frozen):
    """Runs of the same GPU and the same software are comparable."""

    gpu: str | None  # None: no GPU
    software: dict[str, str]


class Entry(Frozen):
    machine: Machine
    seen: Seen


class CalibrationFile(Frozen):
    schema_version: Literal[1] = 1
    entries: tuple[Entry, ...] = ()


def find_calibration_file() -> Path | None:
    """None: switched off."""
    configured = os.environ.get(CALIBRATION_VARIABLE, "")
    if configured.lower() in _OFF:
        return None
    return Path(configured) if configured else find_cache_folder() / _FILE


def load_calibration(hardware: Hardware) -> Calibration:
    """Of the machine that was looked at; one of the catalogue has no runs of its own.

    Each of many nodes makes the plan by itself, and all of them must come to the same one: there is none for them.
    """
    file = find_calibration_file()
    if file is None or hardware.source != "probe" or hardware.nodes > 1 or not file.is_file():
        return NOTHING_LEARNT
    machine = describe_machine(hardware)
    try:
        entries = _read(file).entries
    except (OSError, ValueError) as error:  # pydantic's and Unicode's are of this kind
        _warn(f"{file} cannot be read ({_shorten(error)}): plans go by the estimates alone")
        return NOTHING_LEARNT
    return make_calibration(entry.seen for entry in entries if entry.machine == machine)


def describe_machine(hardware: Hardware) -> Machine:
    return Machine(gpu=None if hardware.gpu is None else hardware.gpu.key, software=_find_software())


@cache
def _find_software() -> dict[str, str]:
    """Who has none of the packages plans for another machine."""
    own = {"python": platform.python_version(), "estimators": _fingerprint_estimators()}
    return own | find_package_versions()


def _fingerprint_estimators() -> str:
    """What a run took of an estimate says nothing of estimates that are made otherwise."""
    folder, digest = Path(__file__).resolve().parent, hashlib.sha256()
    for file in (*sorted((folder / "memory").glob("*.py")), folder / "speed.py", folder / "scaling.py"):
        with suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def remember_run(paths: RunPaths) -> str:
    """Of a run that is done. What was learnt from it, in words; nothing that goes wrong here is the run's fault."""
    file = find_calibration_file()
    if file is None:
        return ""
    try:
        record = load_record(paths)
        why_not = find_disturbance(record)
        if why_not:
            return f"not counted: {why_not}"
        seen = measure_run(record)
        _add(file, Entry(machine=describe_machine(record.plan.hardware), seen=seen))
    except (OSError, LauncherError, ValueError) as error:
        _warn(f"what this run measured is not kept for later plans: {_shorten(error)}")
        return ""
    return f"{_describe(seen)}, kept for later plans in {file}"


def find_disturbance(record: RunRecord) -> str:
    """Why a run says nothing of others like it; empty where it does. Random weights take as long as others."""
    plan, outcome, steps = record.plan, record.outcome, record.steps
    if outcome is None or outcome.status != "done":
        return "it is not done"
    if outcome.rungs:
        return "it ran out of memory on the way"
    if len(outcome.attempts) > 1:
        return "it was taken up again"
    if plan.hardware.nodes > 1:
        return "it ran on many nodes, which plan by the estimates alone"
    if plan.profiled is not None:
        return "some of its steps were traced"
    if len(steps) < _FEWEST_STEPS:
        return f"it has fewer than {_FEWEST_STEPS} steps"
    if steps[-1].values.get(metrics.ALLOC_RETRIES, 0.0) > 0:
        return "the card's memory was short"
    if outcome.observed.get("CUDA graph", "").startswith("failed"):
        return "no CUDA graph could be recorded"
    if outcome.observed.get("torch.compile", "").startswith("failed"):
        return "it was to be compiled, and could not be"
    backend = plan.attention.backend
    if not outcome.observed.get("attention", backend).startswith(backend):
        return "attention was computed otherwise than planned"
    gpu = plan.hardware.gpu
    if gpu is not None and plan.hardware.free_vram_bytes < _FREE_SHARE * gpu.memory_bytes:
        return "others used the card, too"
    return _find_unlikely(measure_run(record))


def _find_unlikely(seen: Seen) -> str:
    for what, ratio, (low, high) in (
        ("memory", seen.memory_ratio, _LIKELY_MEMORY),
        ("speed", seen.speed_ratio, _LIKELY_SPEED),
    ):
        if ratio is not None and not low <= ratio <= high:
            return f"its {what} was {ratio:.2f} of the estimate: something else must have happened"
    return ""


def measure_run(record: RunRecord) -> Seen:
    plan, steps = record.plan, record.steps
    rates = [row.values[metrics.TOKENS_PER_SECOND] for row in steps[_WARM_STEPS:]]
    return Seen(
        run=record.paths.run_id,
        when="" if record.outcome is None else record.outcome.ended_at or record.outcome.started_at,
        family=name_family(plan.base, recipe_of(plan)),
        base=plan.base.name,
        estimated_bytes=estimate_plan(plan).allocated_bytes,
        measured_bytes=_measured_bytes(record),
        estimated_tokens_per_second=plan.speed.estimated_tokens_per_second,
        measured_tokens_per_second=median(rates),
        captured=plan.cuda_graph,
    )


def _measured_bytes(record: RunRecord) -> int | None:
    """Of the training steps alone: the error is told against their peak. An evaluation has a size of its own."""
    error = record.steps[-1].get(metrics.PREDICTION_ERROR)
    return None if error is None else round(record.plan.memory.allocated_bytes / (1.0 + error))


def _add(file: Path, entry: Entry) -> None:
    """The last runs of each family; the oldest go first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file):
        known = _read_or_put_aside(file)
        others = [one for one in known.entries if (one.machine, one.seen.run) != (entry.machine, entry.seen.run)]
        alike = [one for one in others if (one.machine, one.seen.family) == (entry.machine, entry.seen.family)]
        too_old = {id(one) for one in alike[: max(0, len(alike) + 1 - LAST_RUNS)]}
        kept = [one for one in others if id(one) not in too_old][-(_MOST_RUNS - 1) :]
        changed = CalibrationFile(entries=(*kept, entry))
        write_text_atomically(file, changed.model_dump_json(indent=1) + "\n")


def _read_or_put_aside(file: Path) -> CalibrationFile:
    if not file.is_file():
        return CalibrationFile()
    try:
        return _read(file)
    except ValueError as error:
        aside = file.with_name(f"{file.name}.unreadable")
        file.replace(aside)
        _warn(f"{file} cannot be read ({_shorten(error)}): put aside as {aside.name}, and begun anew")
        return CalibrationFile()


def _read(file: Path) -> CalibrationFile:
    return CalibrationFile.model_validate_json(file.read_text(encoding="utf-8"))


def _describe(seen: Seen) -> str:
    ratios = (("memory", seen.memory_ratio), ("speed", seen.speed_ratio))
    known = [f"{what} {100 * (ratio - 1):+.1f} % against the estimate" for what, ratio in ratios if ratio is not None]
    return ", ".join(known) or f"{seen.measured_tokens_per_second:,.0f} tokens/s"


def _shorten(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return f"{error.error_count()} problems"
    return first_line(error)


def _warn(text: str) -> None:
    say(f"warning: {text}")
