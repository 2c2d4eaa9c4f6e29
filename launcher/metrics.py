"""Facts of a training, one a line: what each step did, how long it took, what it held. Names are written here once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from launcher.errors import InputError
from launcher.units import TERA

TRAIN_LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
LEARNING_RATE = "train/learning_rate"
SKIPPED = "train/skipped"  # 1: the step was passed over, its loss or gradients were no numbers
EVAL_LOSS = "eval/loss"
EVAL_SECONDS = "time/evaluation"
TASK_SECONDS = "time/task_evaluation"
EVAL_PREFIX = "eval/"  # of task metrics, too: eval/<check of the judge>, the share of answers that pass it
TOKENS_PER_SECOND = "throughput/tokens_per_sec"
TRAINED_TOKENS_PER_SECOND = "throughput/trained_tokens_per_sec"
SAMPLES_PER_SECOND = "throughput/samples_per_sec"
STEPS_PER_SECOND = "throughput/steps_per_sec"
DEVICE_TOKENS_PER_SECOND = "throughput/device/tokens_per_sec"
DEVICE_MFU = "throughput/device/mfu"
STEP_SECONDS = "time/step"
EPOCH_SECONDS = "time/epoch"  # at the last step of an epoch: all its steps
TOTAL_SECONDS = "time/total"  # since the run began, all attempts, without the pauses between them
DATA_WAIT_SECONDS = "time/data_wait"  # of the host
DATA_WAIT_SHARE = "time/data_wait_share"  # of the step, in which the device had nothing to do for want of data
PEAK_ALLOCATED_GIB = "memory/peak_allocated_gib"
PEAK_RESERVED_GIB = "memory/peak_reserved_gib"
ALLOC_RETRIES = "memory/alloc_retries"
PREDICTED_GIB = "memory/predicted_gib"
PREDICTION_ERROR = "memory/prediction_error"  # predicted / measured - 1
GPU_UTILIZATION = "gpu/utilization"  # 0 to 1: of the time in which some kernel ran
GPU_POWER_WATTS = "gpu/power_watts"
GPU_TEMPERATURE = "gpu/temperature"
JOULES_PER_TOKEN = "gpu/joules_per_token"
# Real tokens / positions of the global batch, empty slots included. Rows that are not packed are laid end to end and
# compute fewer: there it says what padding them all to the full length would have made of it.
PACKING_EFFICIENCY = "data/packing_efficiency"
TOKENS_SEEN = "data/tokens_seen"
GOODPUT = "goodput/fraction"  # of all seconds of the run, those in which it trained what counts
START_SECONDS = "goodput/start_seconds"
COMPILE_SECONDS = "goodput/compile_seconds"
DATA_SECONDS = "goodput/data_wait_seconds"
EVALUATION_SECONDS = "goodput/evaluation_seconds"
CHECKPOINT_SECONDS = "goodput/checkpoint_seconds"
SKIPPED_SECONDS = "goodput/skipped_seconds"
RESTART_SECONDS = "goodput/restart_seconds"  # steps trained again, and what later starts took


# Where the seconds go that are not trained: with them, all of a run's seconds are told.
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
    """How a metric is read: by people, and by whatever sums a run up."""

    name: str
    title: str
    unit: str = ""  # "share": a fraction, shown as a percentage
    better: Literal["lower", "higher"] | None = None  # None: neither


METRICS: tuple[Metric, ...] = (
    Metric(name=TRAIN_LOSS, title="training loss", better="lower"),
    Metric(name=GRAD_NORM, title="norm of the gradients"),
    Metric(name=LEARNING_RATE, title="learning rate"),
    Metric(name=SKIPPED, title="steps passed over", better="lower"),
    Metric(name=EVAL_LOSS, title="held-out loss", better="lower"),
    Metric(name=TOKENS_PER_SECOND, title="tokens a second", unit="tokens/s", better="higher"),
    Metric(name=TRAINED_TOKENS_PER_SECOND, title="trained tokens a second", unit="tokens/s", better="higher"),
    Metric(name=SAMPLES_PER_SECOND, title="rows a second", unit="rows/s", better="higher"),
    Metric(name=STEPS_PER_SECOND, title="steps a second", unit="steps/s", better="higher"),
    Metric(name=DEVICE_TOKENS_PER_SECOND, title="tokens a second of each device", unit="tokens/s", better="higher"),
    Metric(name=DEVICE_MFU, title="model FLOPs utilisation", unit="share", better="higher"),
    Metric(name=STEP_SECONDS, title="step", unit="s", better="lower"),
    Metric(name=EPOCH_SECONDS, title="epoch", unit="s", better="lower"),
    Metric(name=EVAL_SECONDS, title="one evaluation", unit="s", better="lower"),
    Metric(name=TASK_SECONDS, title="answering and judging", unit="s", better="lower"),
    Metric(name=TOTAL_SECONDS, title="wall-clock time", unit="s", better="lower"),
    Metric(name=DATA_WAIT_SECONDS, title="host waits for data", unit="s", better="lower"),
    Metric(name=DATA_WAIT_SHARE, title="device waits for data", unit="share", better="lower"),
    Metric(name=PEAK_ALLOCATED_GIB, title="peak memory, allocated", unit="GiB", better="lower"),
    Metric(name=PEAK_RESERVED_GIB, title="peak memory, reserved", unit="GiB", better="lower"),
    Metric(name=ALLOC_RETRIES, title="allocations that emptied the cache", better="lower"),
    Metric(name=PREDICTED_GIB, title="peak memory, predicted", unit="GiB"),
    Metric(name=PREDICTION_ERROR, title="error of the prediction", unit="share"),
    Metric(name=GPU_UTILIZATION, title="GPU utilisation", unit="share", better="higher"),
    Metric(name=GPU_POWER_WATTS, title="GPU power", unit="W"),
    Metric(name=GPU_TEMPERATURE, title="GPU temperature", unit="°C"),
    Metric(name=JOULES_PER_TOKEN, title="energy of a token", unit="J", better="lower"),
    Metric(name=PACKING_EFFICIENCY, title="packing efficiency", unit="share", better="higher"),
    Metric(name=TOKENS_SEEN, title="tokens seen", unit="tokens"),
    Metric(name=GOODPUT, title="goodput", unit="share", better="higher"),
    Metric(name=START_SECONDS, title="lost to the start", unit="s", better="lower"),
    Metric(name=COMPILE_SECONDS, title="lost to compiling", unit="s", better="lower"),
    Metric(name=DATA_SECONDS, title="lost waiting for data", unit="s", better="lower"),
    Metric(name=EVALUATION_SECONDS, title="lost to evaluation", unit="s", better="lower"),
    Metric(name=CHECKPOINT_SECONDS, title="lost to checkpoints", unit="s", better="lower"),
    Metric(name=SKIPPED_SECONDS, title="lost to steps passed over", unit="s", better="lower"),
    Metric(name=RESTART_SECONDS, title="lost to restarts", unit="s", better="lower"),
)
METRICS_BY_NAME: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in METRICS})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    step: int  # how many steps are done; 0: what the base can do already
    epoch: float
    values: dict[str, float]
    packs: tuple[int, ...] = ()  # which packs were trained: the sample ids

    @property
    def is_evaluation(self) -> bool:
        return any(name.startswith(EVAL_PREFIX) for name in self.values)

    def get(self, name: str) -> float | None:
        return self.values.get(name)


def find_values(rows: Iterable[StepMetrics], name: str) -> list[float]:
    """Of the rows that tell it, in order; what is no number is left out."""
    found = (row.get(name) for row in rows)
    return [value for value in found if value is not None and math.isfinite(value)]


def is_task_metric(name: str) -> bool:
    """All of eval/ that has no meaning of its own here: a check of a judge, whoever wrote it."""
    return name.startswith(EVAL_PREFIX) and name != EVAL_PREFIX and name not in METRICS_BY_NAME


def find_task_metrics(row: StepMetrics) -> dict[str, float]:
    """By the check's name: the share of answers that pass it."""
    return {name.removeprefix(EVAL_PREFIX): value for name, value in row.values.items() if is_task_metric(name)}


def append_metrics(path: Path, metrics: StepMetrics) -> None:
    """A line is written at once: what a killed run leaves behind is whole up to its last line."""
    row = asdict(metrics)
    # JSON has no word for what is no number.
    row["values"] = {name: value if math.isfinite(value) else None for name, value in metrics.values.items()}
    line = json.dumps(row, separators=(",", ":"), allow_nan=False)
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        with suppress(OSError):  # half a line would spoil the next one, too
            os.truncate(path, size)
        raise


def load_metrics(path: Path) -> list[StepMetrics]:
    """A last line without its end is what a kill left of one, and is passed over."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    rows = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            rows.append(parse_metrics(line))
        except InputError as error:
            raise InputError(f"{path}: line {number}: {error.title}") from None
    return rows


def parse_metrics(line: str) -> StepMetrics:
    try:
        row = json.loads(line)
        values = {name: math.nan if value is None else float(value) for name, value in row["values"].items()}
        packs = tuple(row["packs"])
        return StepMetrics(step=int(row["step"]), epoch=float(row["epoch"]), values=values, packs=packs)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError("it is not a line of metrics") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class CutMetrics:
    kept: tuple[StepMetrics, ...] = ()
    rest: tuple[StepMetrics, ...] = ()  # steps that will be trained again


def cut_metrics(path: Path, step: int, *, without_evaluation: bool = False) -> CutMetrics:
    """Keeps what was told up to a step, whole; from step 0 nothing.

    `without_evaluation`: that of the step itself will be made again, too.
    """
    if not path.exists():
        return CutMetrics()
    rows = load_metrics(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    kept = []
    for row in rows:
        is_made_again = step == 0 or (without_evaluation and row.step == step and row.is_evaluation)
        if row.step <= step and not is_made_again:
            append_metrics(temporary, row)
            kept.append(row)
    temporary.replace(path)
    return CutMetrics(kept=tuple(kept), rest=tuple(row for row in rows if row.step > step))


def compute_mfu(tokens_per_second: float, flops_per_token: float, peak_tflops: float | None) -> float | None:
    """Of one device; None where its peak is unknown."""
    if peak_tflops is None or not math.isfinite(tokens_per_second):
        return None
    return tokens_per_second * flops_per_token / (peak_tflops * TERA)
