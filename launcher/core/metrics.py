"""Metrics of a training, one row per line of metrics.jsonl: names, titles, reading and writing."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from launcher.core.errors import InputError
from launcher.core.run_files import MAX_STEPS, is_plausible, open_log, read_text
from launcher.core.units import MIB, TERA

_MAX_BYTES = 512 * MIB  # of metrics.jsonl: some 300,000 steps

TRAIN_LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
LEARNING_RATE = "train/learning_rate"
SKIPPED = "train/skipped"  # 1: the step was skipped because of NaN/Inf loss or gradients
EVAL_LOSS = "eval/loss"
EVAL_SECONDS = "time/evaluation"
TASK_SECONDS = "time/task_evaluation"
EVAL_PREFIX = "eval/"  # also of task metrics: eval/<check>, the fraction of answers that pass it
TOKENS_PER_SECOND = "throughput/tokens_per_sec"
TRAINED_TOKENS_PER_SECOND = "throughput/trained_tokens_per_sec"
SAMPLES_PER_SECOND = "throughput/samples_per_sec"
STEPS_PER_SECOND = "throughput/steps_per_sec"
DEVICE_TOKENS_PER_SECOND = "throughput/device/tokens_per_sec"
DEVICE_MFU = "throughput/device/mfu"
STEP_SECONDS = "time/step"
EPOCH_SECONDS = "time/epoch"  # at the last step of an epoch: all its steps
TOTAL_SECONDS = "time/total"  # since the run started, over all attempts, without the pauses between them
DATA_WAIT_SECONDS = "time/data_wait"  # of the host
DATA_WAIT_SHARE = "time/data_wait_share"  # fraction of the step in which the device waited for data
PEAK_ALLOCATED_GIB = "memory/peak_allocated_gib"
PEAK_RESERVED_GIB = "memory/peak_reserved_gib"
ALLOC_RETRIES = "memory/alloc_retries"
PREDICTED_GIB = "memory/predicted_gib"
PREDICTION_ERROR = "memory/prediction_error"  # predicted / measured - 1
GPU_UTILIZATION = "gpu/utilization"  # 0 to 1: fraction of time in which a kernel ran
GPU_POWER_WATTS = "gpu/power_watts"
GPU_TEMPERATURE = "gpu/temperature"
JOULES_PER_TOKEN = "gpu/joules_per_token"
HOST_LOAD = "host/load"  # load average of the last minute, per core
# Real tokens / positions of the global batch, empty slots included. Without packing, rows are concatenated and compute
# fewer positions: there it is the efficiency that padding to the full length would have.
PACKING_EFFICIENCY = "data/packing_efficiency"
TOKENS_SEEN = "data/tokens_seen"
GOODPUT = "goodput/fraction"  # fraction of the run's seconds spent on steps that count
START_SECONDS = "goodput/start_seconds"
COMPILE_SECONDS = "goodput/compile_seconds"
DATA_SECONDS = "goodput/data_wait_seconds"
EVALUATION_SECONDS = "goodput/evaluation_seconds"
CHECKPOINT_SECONDS = "goodput/checkpoint_seconds"
SKIPPED_SECONDS = "goodput/skipped_seconds"
RESTART_SECONDS = "goodput/restart_seconds"  # steps trained again, and the start-up time of later attempts


# Seconds not spent on training; together with training they account for all of a run.
LOST_SECONDS = (
    START_SECONDS,
    COMPILE_SECONDS,
    DATA_SECONDS,
    EVALUATION_SECONDS,
    CHECKPOINT_SECONDS,
    SKIPPED_SECONDS,
    RESTART_SECONDS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Title, unit and direction of a metric."""

    name: str
    title: str
    unit: str = ""  # "share": a fraction, shown as a percentage
    better: Literal["lower", "higher"] | None = None  # None: neither


METRICS: tuple[Metric, ...] = (
    Metric(name=TRAIN_LOSS, title="training loss", better="lower"),
    Metric(name=GRAD_NORM, title="gradient norm"),
    Metric(name=LEARNING_RATE, title="learning rate"),
    Metric(name=SKIPPED, title="skipped steps", better="lower"),
    Metric(name=EVAL_LOSS, title="validation loss", better="lower"),
    Metric(name=TOKENS_PER_SECOND, title="tokens per second", unit="tokens/s", better="higher"),
    Metric(name=TRAINED_TOKENS_PER_SECOND, title="trained tokens per second", unit="tokens/s", better="higher"),
    Metric(name=SAMPLES_PER_SECOND, title="rows per second", unit="rows/s", better="higher"),
    Metric(name=STEPS_PER_SECOND, title="steps per second", unit="steps/s", better="higher"),
    Metric(name=DEVICE_TOKENS_PER_SECOND, title="tokens per second per device", unit="tokens/s", better="higher"),
    Metric(name=DEVICE_MFU, title="model FLOPs utilisation", unit="share", better="higher"),
    Metric(name=STEP_SECONDS, title="step time", unit="s", better="lower"),
    Metric(name=EPOCH_SECONDS, title="epoch time", unit="s", better="lower"),
    Metric(name=EVAL_SECONDS, title="evaluation time", unit="s", better="lower"),
    Metric(name=TASK_SECONDS, title="generation and grading", unit="s", better="lower"),
    Metric(name=TOTAL_SECONDS, title="wall-clock time", unit="s", better="lower"),
    Metric(name=DATA_WAIT_SECONDS, title="host data wait", unit="s", better="lower"),
    Metric(name=DATA_WAIT_SHARE, title="device data wait", unit="share", better="lower"),
    Metric(name=PEAK_ALLOCATED_GIB, title="peak memory, allocated", unit="GiB", better="lower"),
    Metric(name=PEAK_RESERVED_GIB, title="peak memory, reserved", unit="GiB", better="lower"),
    Metric(name=ALLOC_RETRIES, title="allocation retries", better="lower"),
    Metric(name=PREDICTED_GIB, title="peak memory, predicted", unit="GiB"),
    Metric(name=PREDICTION_ERROR, title="prediction error", unit="share"),
    Metric(name=GPU_UTILIZATION, title="GPU utilisation", unit="share", better="higher"),
    Metric(name=GPU_POWER_WATTS, title="GPU power", unit="W"),
    Metric(name=GPU_TEMPERATURE, title="GPU temperature", unit="°C"),
    Metric(name=JOULES_PER_TOKEN, title="energy per token", unit="J", better="lower"),
    Metric(name=HOST_LOAD, title="host load per core"),
    Metric(name=PACKING_EFFICIENCY, title="packing efficiency", unit="share", better="higher"),
    Metric(name=TOKENS_SEEN, title="tokens seen", unit="tokens"),
    Metric(name=GOODPUT, title="goodput", unit="share", better="higher"),
    Metric(name=START_SECONDS, title="lost to startup", unit="s", better="lower"),
    Metric(name=COMPILE_SECONDS, title="lost to compilation", unit="s", better="lower"),
    Metric(name=DATA_SECONDS, title="lost to data wait", unit="s", better="lower"),
    Metric(name=EVALUATION_SECONDS, title="lost to evaluation", unit="s", better="lower"),
    Metric(name=CHECKPOINT_SECONDS, title="lost to checkpoints", unit="s", better="lower"),
    Metric(name=SKIPPED_SECONDS, title="lost to skipped steps", unit="s", better="lower"),
    Metric(name=RESTART_SECONDS, title="lost to restarts", unit="s", better="lower"),
)
METRICS_BY_NAME: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in METRICS})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Metrics of one step or evaluation."""

    step: int  # completed steps; 0: the base model
    epoch: float
    values: dict[str, float]
    packs: tuple[int, ...] = ()  # ids of the packs that were trained

    @property
    def is_evaluation(self) -> bool:
        """Whether the row holds an evaluation."""
        return any(name.startswith(EVAL_PREFIX) for name in self.values)

    def get(self, name: str) -> float | None:
        """Return a value, or None."""
        return self.values.get(name)


def find_values(rows: Iterable[StepMetrics], name: str) -> list[float]:
    """Return the finite values of a metric, in order."""
    found = (row.get(name) for row in rows)
    return [value for value in found if value is not None and math.isfinite(value)]


def is_task_metric(name: str) -> bool:
    """Whether a metric is a task metric: under eval/, but not one of ours."""
    return name.startswith(EVAL_PREFIX) and name != EVAL_PREFIX and name not in METRICS_BY_NAME


def find_task_metrics(row: StepMetrics) -> dict[str, float]:
    """Return the fraction of passing answers by check."""
    return {name.removeprefix(EVAL_PREFIX): value for name, value in row.values.items() if is_task_metric(name)}


def append_metrics(path: Path, metrics: StepMetrics) -> None:
    """Append a row in one write, so that a killed run leaves complete lines."""
    row = asdict(metrics)
    # JSON has no NaN or Inf.
    row["values"] = {name: value if math.isfinite(value) else None for name, value in metrics.values.items()}
    line = json.dumps(row, separators=(",", ":"), allow_nan=False)
    size = path.stat().st_size if path.exists() else 0
    try:
        data = f"{line}\n".encode()
        with open_log(path) as file:
            if file.write(data) < len(data):  # unbuffered: a full disk takes a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with suppress(OSError):  # a partial line would corrupt the next one, too
            os.truncate(path, size)
        raise


def load_metrics(path: Path) -> list[StepMetrics]:
    """Load metrics.jsonl; an incomplete last line, left by a killed run, is skipped."""
    text = read_text(path, _MAX_BYTES)
    rows = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].split("\n")[:-1], start=1):
        try:
            rows.append(parse_metrics(line))
        except InputError as error:
            raise InputError(f"{path}: line {number}: {error.title}") from None
    return rows


def parse_metrics(line: str) -> StepMetrics:
    """Parse a line of metrics.jsonl."""
    try:
        row = json.loads(line)
        values = {name: math.nan if value is None else float(value) for name, value in row["values"].items()}
        step, epoch, packs = int(row["step"]), float(row["epoch"]), tuple(map(int, row["packs"]))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise InputError("not a line of metrics") from None
    numbers = (epoch, *packs, *(value for value in values.values() if not math.isnan(value)))
    if not (0 <= step <= MAX_STEPS and all(map(is_plausible, numbers)) and all(map(str.isprintable, values))):
        raise InputError("not a line of metrics")
    return StepMetrics(step=step, epoch=epoch, values=values, packs=packs)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutMetrics:
    """Rows before and after the step where a run resumes."""

    kept: tuple[StepMetrics, ...] = ()
    rest: tuple[StepMetrics, ...] = ()  # steps that will be trained again


def cut_metrics(path: Path, step: int, *, without_evaluation: bool = False) -> CutMetrics:
    """Truncate metrics.jsonl after a step; step 0 removes everything.

    `without_evaluation` also removes the evaluation of that step, which will be repeated.
    """
    if not path.exists():
        return CutMetrics()
    rows = load_metrics(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    kept = []
    for row in rows:
        is_repeated = step == 0 or (without_evaluation and row.step == step and row.is_evaluation)
        if row.step <= step and not is_repeated:
            append_metrics(temporary, row)
            kept.append(row)
    temporary.replace(path)
    return CutMetrics(kept=tuple(kept), rest=tuple(row for row in rows if row.step > step))


def compute_mfu(tokens_per_second: float, flops_per_token: float, peak_tflops: float | None) -> float | None:
    """Return the model FLOPs utilization of one device; None if its peak is unknown."""
    if peak_tflops is None or not math.isfinite(tokens_per_second):
        return None
    return tokens_per_second * flops_per_token / (peak_tflops * TERA)
