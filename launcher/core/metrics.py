"""Metrics of a training, one row per line of metrics.jsonl: names, titles, reading and writing."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from launcher.core.errors import InputError
from launcher.core.run_files import MAX_STEPS, is_plausible, open_log, read_lines
from launcher.core.units import MIB, TERA

_MAX_BYTES = 512 * MIB  # of metrics.jsonl: some 300,000 steps
SPIKE_WINDOW = 64  # recent steps that a loss is compared with
_MIN_SPIKE_WINDOW = 16
# A spike exceeds the median by this many median absolute deviations, and by this fraction of the median.
_SPIKE_DEVIATIONS, _SPIKE_FRACTION = 8.0, 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Name, title and unit of a metric, and whether lower or higher values are better."""

    name: str
    title: str
    unit: str = ""  # "share": a fraction, shown as a percentage
    better: Literal["lower", "higher"] | None = None  # None: neither


METRICS_BY_NAME: dict[str, Metric] = {}


def _declare(name: str, title: str, *, unit: str = "", better: Literal["lower", "higher"] | None = None) -> str:
    """Declare a metric and return its name."""
    METRICS_BY_NAME[name] = Metric(name=name, title=title, unit=unit, better=better)
    return name


TRAIN_LOSS = _declare("train/loss", "training loss", better="lower")
GRAD_NORM = _declare("train/grad_norm", "gradient norm")
LEARNING_RATE = _declare("train/learning_rate", "learning rate")
# 1: the step was skipped because of NaN/Inf loss or gradients.
SKIPPED = _declare("train/skipped", "skipped steps", better="lower")
EVAL_LOSS = _declare("eval/loss", "validation loss", better="lower")
TOKENS_PER_SECOND = _declare("throughput/tokens_per_sec", "tokens per second", unit="tokens/s", better="higher")
TRAINED_TOKENS_PER_SECOND = _declare(
    "throughput/trained_tokens_per_sec", "trained tokens per second", unit="tokens/s", better="higher"
)
SAMPLES_PER_SECOND = _declare("throughput/samples_per_sec", "rows per second", unit="rows/s", better="higher")
STEPS_PER_SECOND = _declare("throughput/steps_per_sec", "steps per second", unit="steps/s", better="higher")
DEVICE_TOKENS_PER_SECOND = _declare(
    "throughput/device/tokens_per_sec", "tokens per second per device", unit="tokens/s", better="higher"
)
DEVICE_MFU = _declare("throughput/device/mfu", "model FLOPs utilization", unit="share", better="higher")
STEP_SECONDS = _declare("time/step", "step time", unit="s", better="lower")
# At the last step of an epoch: all its steps.
EPOCH_SECONDS = _declare("time/epoch", "epoch time", unit="s", better="lower")
EVAL_SECONDS = _declare("time/evaluation", "evaluation time", unit="s", better="lower")
TASK_SECONDS = _declare("time/task_evaluation", "generation and grading", unit="s", better="lower")
# Since the run started, over all attempts, without the pauses between them.
TOTAL_SECONDS = _declare("time/total", "wall-clock time", unit="s", better="lower")
DATA_WAIT_SECONDS = _declare("time/data_wait", "host data wait", unit="s", better="lower")
# Fraction of the step in which the device waited for data.
DATA_WAIT_SHARE = _declare("time/data_wait_share", "device data wait", unit="share", better="lower")
PEAK_ALLOCATED_GIB = _declare("memory/peak_allocated_gib", "peak memory, allocated", unit="GiB", better="lower")
PEAK_RESERVED_GIB = _declare("memory/peak_reserved_gib", "peak memory, reserved", unit="GiB", better="lower")
ALLOC_RETRIES = _declare("memory/alloc_retries", "allocation retries", better="lower")
PREDICTED_GIB = _declare("memory/predicted_gib", "peak memory, predicted", unit="GiB")
PREDICTION_ERROR = _declare("memory/prediction_error", "prediction error", unit="share")  # predicted / measured - 1
# 0 to 1: fraction of time in which a kernel ran.
GPU_UTILIZATION = _declare("gpu/utilization", "GPU utilization", unit="share", better="higher")
GPU_POWER_WATTS = _declare("gpu/power_watts", "GPU power", unit="W")
GPU_TEMPERATURE = _declare("gpu/temperature", "GPU temperature", unit="°C")
JOULES_PER_TOKEN = _declare("gpu/joules_per_token", "energy per token", unit="J", better="lower")
USED_GIB = _declare("gpu/used_memory_gib", "GPU memory in use", unit="GiB")  # by all processes
HOST_LOAD = _declare("host/load", "host load per core")  # load average of the last minute, per core
# Real tokens / positions of the global batch, empty slots included. Without packing, rows are concatenated and compute
# fewer positions: there it is the efficiency that padding to the full length would have.
PACKING_EFFICIENCY = _declare("data/packing_efficiency", "packing efficiency", unit="share", better="higher")
TOKENS_SEEN = _declare("data/tokens_seen", "tokens seen", unit="tokens")
# Fraction of the run's seconds spent on steps that count.
GOODPUT = _declare("goodput/fraction", "goodput", unit="share", better="higher")
START_SECONDS = _declare("goodput/start_seconds", "lost to startup", unit="s", better="lower")
COMPILE_SECONDS = _declare("goodput/compile_seconds", "lost to compilation", unit="s", better="lower")
DATA_SECONDS = _declare("goodput/data_wait_seconds", "lost to data wait", unit="s", better="lower")
EVALUATION_SECONDS = _declare("goodput/evaluation_seconds", "lost to evaluation", unit="s", better="lower")
CHECKPOINT_SECONDS = _declare("goodput/checkpoint_seconds", "lost to checkpoints", unit="s", better="lower")
SKIPPED_SECONDS = _declare("goodput/skipped_seconds", "lost to skipped steps", unit="s", better="lower")
# Steps trained again, and the start-up time of later attempts.
RESTART_SECONDS = _declare("goodput/restart_seconds", "lost to restarts", unit="s", better="lower")

METRICS = tuple(METRICS_BY_NAME.values())
EVAL_PREFIX = "eval/"  # also of task metrics: eval/<check>, the fraction of answers that pass it

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
        """Return the value of a metric; None if the row does not have it."""
        return self.values.get(name)


def find_values(rows: Iterable[StepMetrics], name: str) -> list[float]:
    """Return the finite values of a metric, in order."""
    found = (row.get(name) for row in rows)
    return [value for value in found if value is not None and math.isfinite(value)]


def is_loss_spike(loss: float, recent: Sequence[float]) -> bool:
    """Return whether a loss is far above those of the recent steps; False after fewer than 16 steps."""
    if len(recent) < _MIN_SPIKE_WINDOW:
        return False
    usual = median(recent)
    deviation = median(abs(other - usual) for other in recent)
    return loss > usual + max(_SPIKE_DEVIATIONS * deviation, _SPIKE_FRACTION * usual)


def is_task_metric(name: str) -> bool:
    """Whether a metric is a task metric: its name starts with eval/, and it is not a built-in metric."""
    return name.startswith(EVAL_PREFIX) and name != EVAL_PREFIX and name not in METRICS_BY_NAME


def find_task_metrics(row: StepMetrics) -> dict[str, float]:
    """Return the task metrics of a row: for each check, the fraction of answers that pass it."""
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


def load_metrics(path: Path, max_bytes: int | None = _MAX_BYTES) -> list[StepMetrics]:
    """Load metrics.jsonl; an incomplete last line, left by a killed run, is skipped.

    Without `max_bytes`, files of any size are loaded: a run that resumes needs its own metrics.
    """
    rows = []
    for number, line in enumerate(read_lines(path, max_bytes), start=1):
        try:
            rows.append(parse_metrics(line))
        except InputError as error:
            hint = "it was edited or damaged; delete the line to continue without its metrics"
            raise InputError(f"{path}: line {number}: {error.title}", hint=hint) from None
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
    rows = load_metrics(path, max_bytes=None)
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
