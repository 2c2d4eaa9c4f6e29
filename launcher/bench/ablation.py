"""Run an ablation of training speed: one process per stage, with a time limit; resuming keeps finished stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

import launcher
from launcher.bench.ablation_stages import LoopConfig, Measurement, Mode
from launcher.bench.worker import (
    MeasurementFailedError,
    MeasurementProcess,
    MeasurementTimeoutError,
    Timing,
)
from launcher.core.errors import ExitCode
from launcher.core.frozen_model import Frozen
from launcher.core.versions import find_package_versions
from launcher.plan.model import Plan

_MODULE = "launcher.bench.workers.ablation"
RECORDS_FILE = "stages.jsonl"
_FINGERPRINTED = ("training", "corpus", "plan/estimate", "bench")  # code of a step, and of its measurement

# Parts of a specification that change between two probes of machine and data and do not affect a step.
_VOLATILE_PLAN: dict[str, bool | set[str]] = dict.fromkeys(
    ("decisions", "notes", "memory", "speed", "oom_fallbacks"), True
)
_VOLATILE = {
    "plan": {
        **_VOLATILE_PLAN,
        "hardware": {"free_vram_mib", "ram_gib_per_node"},
        "data": {"basis", "mean_tokens"},  # estimated until the data is prepared
    }
}

Status = Literal["measured", "unavailable", "out of memory", "timeout", "failed"]


class StageSpec(Frozen):
    """Input of the process that measures an ablation stage: plan, prepared data, loop settings and numbers of steps."""

    plan: Plan
    store: str
    config: LoopConfig | None
    warmup_steps: int
    timed_steps: int
    seconds: float  # time limit of the steps; at least one warm-up step and two timed ones are run


class StageRecord(Frozen):
    """Outcome of one ablation stage: a line of stages.jsonl."""

    key: str
    title: str
    mode: Mode
    status: Status
    reason: str = ""
    config: LoopConfig | None = None
    timing: Timing | None = None
    fingerprint: str = ""

    def format_outcome(self) -> str:
        """Return the measured tokens/s as text, or the status and the reason if there is no measurement."""
        if self.timing is not None:
            return f"{self.timing.tokens_per_second:,.0f} tokens/s"
        return f"{self.status}: {self.reason}"


class AblationEffort(Frozen):
    """Number of warm-up and timed steps of each ablation stage, and time limits."""

    warmup_steps: int
    timed_steps: int
    seconds: float
    limit_seconds: float


def run_ablation(
    plan: Plan,
    store: Path,
    measurements: Sequence[Measurement],
    effort: AblationEffort,
    folder: Path,
    report: Callable[[str], None],
) -> tuple[StageRecord, ...]:
    """Measure the stages of an ablation in order; a stage that fails is recorded, and the next one is measured."""
    file = folder / RECORDS_FILE
    known, software = _load_records(file), _hash_software()
    records: list[StageRecord] = []
    for number, measurement in enumerate(measurements, 1):
        identity = {"key": measurement.key, "title": measurement.title, "mode": measurement.mode}
        if measurement.unavailable:
            unavailable = {"status": "unavailable", "reason": measurement.unavailable}
            records.append(StageRecord.model_validate({**identity, **unavailable}))
            continue
        keys = () if measurement.in_fp8 else ("fp8_base", "fp8_layers")
        precision = plan.precision.model_copy(update=dict.fromkeys(keys, False))
        spec = StageSpec(
            plan=plan.model_copy(update={"precision": precision}),
            store=str(store.resolve()),
            config=measurement.config,
            warmup_steps=effort.warmup_steps,
            timed_steps=effort.timed_steps,
            seconds=effort.seconds,
        )
        fingerprint = _fingerprint(spec, measurement, software)
        record, suffix = known.get(fingerprint), " (already measured)"
        if record is None:
            name = f"{measurement.mode}-{measurement.key}"
            outcome = _measure(MeasurementProcess(_MODULE, spec, folder / "logs", name), effort.limit_seconds)
            stage = {**identity, "config": measurement.config, "fingerprint": fingerprint}
            record, suffix = StageRecord.model_validate({**stage, **outcome}), ""
            _append(file, record)
            known[fingerprint] = record
        progress = f"{number} of {len(measurements)}, {measurement.mode}: {measurement.title}"
        report(f"{progress}: {record.format_outcome()}{suffix}")
        records.append(record.model_copy(update=identity))
    return tuple(records)


def _append(file: Path, record: StageRecord) -> None:
    """Append a record as a new line, even if a killed process left the last line of the file incomplete."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    separator = "\n" if text and not text.endswith("\n") else ""
    with file.open("a", encoding="utf-8") as out:
        out.write(f"{separator}{record.model_dump_json()}\n")


def _fingerprint(spec: StageSpec, measurement: Measurement, software: str) -> str:
    """Hash what a stage's speed depends on (plan, stage, code, libraries); the repeated baseline has its own hash."""
    is_repeat = measurement.key == "baseline" and measurement.mode == "alone"
    return hashlib.sha256(f"{spec.model_dump_json(exclude=_VOLATILE)}\n{software}\n{is_repeat}".encode()).hexdigest()[
        :24
    ]


def _hash_software() -> str:
    """Hash code and library versions; measurements with another hash are not reused."""
    versions = find_package_versions()
    digest = hashlib.sha256("".join(f"{name} {version}\n" for name, version in versions.items()).encode())
    package = Path(launcher.__file__).parent
    for folder in _FINGERPRINTED:
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _load_records(file: Path) -> dict[str, StageRecord]:
    """Load earlier results by fingerprint, without unreadable lines and without failures other than out of memory."""
    known: dict[str, StageRecord] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            record = StageRecord.model_validate_json(line)
        except ValidationError:
            continue
        if record.status in ("measured", "out of memory"):  # other failures may not happen again
            known[record.fingerprint] = record
    return known


def _measure(process: MeasurementProcess, limit_seconds: float) -> dict[str, object]:
    """Measure a stage in its process; return its status, with the timing or with the reason why there is none."""
    try:
        with process:
            timing = Timing.model_validate_json(process.read(limit_seconds))
    except MeasurementTimeoutError:
        return {"status": "timeout", "reason": f"not finished after {limit_seconds:.0f} s"}
    except MeasurementFailedError as error:
        is_too_large = error.exit_code == ExitCode.DOES_NOT_FIT
        return {"status": "out of memory" if is_too_large else "failed", "reason": error.reason}
    return {"status": "measured", "timing": timing}
