"""Facts of a training, one a line: what each step did, how long it took, what it held. Names are written here once."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.units import TERA

TRAIN_LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
LEARNING_RATE = "train/learning_rate"
SKIPPED = "train/skipped"  # 1: the step was passed over, its loss or gradients were no numbers
EVAL_LOSS = "eval/loss"
EVAL_SECONDS = "time/evaluation"
TOKENS_PER_SECOND = "throughput/tokens_per_sec"
TRAINED_TOKENS_PER_SECOND = "throughput/trained_tokens_per_sec"
SAMPLES_PER_SECOND = "throughput/samples_per_sec"
DEVICE_TOKENS_PER_SECOND = "throughput/device/tokens_per_sec"
DEVICE_MFU = "throughput/device/mfu"
STEP_SECONDS = "time/step"
DATA_WAIT_SECONDS = "time/data_wait"
PEAK_ALLOCATED_GIB = "memory/peak_allocated_gib"
PEAK_RESERVED_GIB = "memory/peak_reserved_gib"
ALLOC_RETRIES = "memory/alloc_retries"
PREDICTED_GIB = "memory/predicted_gib"
TOKENS_SEEN = "data/tokens_seen"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    step: int  # from 1: how many steps are done
    epoch: float
    values: dict[str, float]
    packs: tuple[int, ...] = ()  # which packs were trained: the sample ids

    def get(self, name: str) -> float | None:
        return self.values.get(name)


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
    text = path.read_text(encoding="utf-8")
    rows = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        row = json.loads(line)
        values = {name: math.nan if value is None else value for name, value in row["values"].items()}
        rows.append(StepMetrics(**{**row, "values": values, "packs": tuple(row["packs"])}))
    return rows


def cut_metrics(path: Path, step: int, *, without_evaluation: bool = False) -> list[StepMetrics]:
    """Keeps what was told up to a step, whole; returns the rest, which will be trained again.

    `without_evaluation`: that of the step itself will be made again, too.
    """
    if not path.exists():
        return []
    rows = load_metrics(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    for row in rows:
        is_made_again = without_evaluation and row.step == step and EVAL_LOSS in row.values
        if row.step <= step and not is_made_again:
            append_metrics(temporary, row)
    temporary.replace(path)
    return [row for row in rows if row.step > step]


def compute_mfu(tokens_per_second: float, flops_per_token: float, peak_tflops: float | None) -> float | None:
    """Of one device; None where its peak is unknown."""
    if peak_tflops is None or not math.isfinite(tokens_per_second):
        return None
    return tokens_per_second * flops_per_token / (peak_tflops * TERA)
