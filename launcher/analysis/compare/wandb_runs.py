"""Load W&B offline runs with `wandb leet inspect`, since their file format is private."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from launcher.analysis.compare.config_diff import collect_config_settings
from launcher.analysis.compare.load_run import Column, RunFacts, Traits, make_columns
from launcher.analysis.compare.task_results import select_rates
from launcher.core.errors import InputError
from launcher.core.frozen_model import flatten
from launcher.core.metrics import (
    DEVICE_MFU,
    EVAL_LOSS,
    GPU_UTILIZATION,
    GRAD_NORM,
    LEARNING_RATE,
    METRICS_BY_NAME,
    PREDICTED_GIB,
    TOKENS_PER_SECOND,
    TOKENS_SEEN,
    TOTAL_SECONDS,
    TRAIN_LOSS,
    StepMetrics,
    is_task_metric,
)

_TIMEOUT_SECONDS = 120
_BUSY = re.compile(r"gpu\.\d+\.gpu")
_MAX_SETTINGS = 2_000
# Names of other trainers for our metrics.
_ALIASES: Mapping[str, str] = {
    "loss": TRAIN_LOSS,
    "train_loss": TRAIN_LOSS,
    "training_loss": TRAIN_LOSS,
    "eval_loss": EVAL_LOSS,
    "val_loss": EVAL_LOSS,
    "val/loss": EVAL_LOSS,
    "valid/loss": EVAL_LOSS,
    "validation/loss": EVAL_LOSS,
    "grad_norm": GRAD_NORM,
    "lr": LEARNING_RATE,
    "learning_rate": LEARNING_RATE,
    "mfu": DEVICE_MFU,
    "train/mfu": DEVICE_MFU,
    "tokens_per_sec": TOKENS_PER_SECOND,
    "tokens_per_second": TOKENS_PER_SECOND,
    "train/tokens_per_second": TOKENS_PER_SECOND,
    "num_tokens": TOKENS_SEEN,
    "train/num_tokens": TOKENS_SEEN,
    "train/num_input_tokens_seen": TOKENS_SEEN,
    "gpu_utilization": GPU_UTILIZATION,
    "_runtime": TOTAL_SECONDS,
}
# _step counts calls of log(), so the trainer's own step is preferred.
_STEPS = ("train/global_step", "trainer/global_step", "global_step", "train/step", "step", "_step")


@dataclass(slots=True)
class _Log:
    """Records parsed so far."""

    name: str = ""
    started_at: str | None = None
    exit_code: int | None = None
    config: dict[str, object] = field(default_factory=dict)
    rows: list[StepMetrics] = field(default_factory=list)
    moments: list[tuple[float, int]] = field(default_factory=list)  # time and step
    utilization: list[tuple[float, float]] = field(default_factory=list)  # time and GPU utilization


def find_wandb_log(path: Path) -> Path | None:
    """Return the log of a W&B run, given as a file or an offline-run-* directory; None if it is not one."""
    try:
        if path.suffix == ".wandb" and path.is_file():
            return path
        logs = sorted(path.glob("run-*.wandb")) if path.is_dir() else []
    except OSError:
        return None
    return logs[0] if logs else None


def load_wandb_run(log: Path) -> RunFacts:
    """Load a W&B offline run of any trainer."""
    parsed = _parse(log, _inspect(log).splitlines())
    status: Literal["running", "done", "failed"] = "running"
    if parsed.exit_code is not None:
        status = "done" if parsed.exit_code == 0 else "failed"
    steps_done = max((row.step for row in parsed.rows), default=0)
    columns = _drop_foreign_metrics(make_columns(parsed.rows))
    return RunFacts(
        name=parsed.name.strip() or log.stem.removeprefix("run-"),
        place=str(log),
        kind="wandb",
        status=status,
        traits=_collect_traits(parsed.config, columns),
        columns=columns,
        settings=collect_config_settings(parsed.config),
        started_at=parsed.started_at,
        steps_done=steps_done,
        num_steps=_find_num_steps(parsed.config),
    )


def _drop_foreign_metrics(columns: dict[str, Column]) -> dict[str, Column]:
    """Drop eval/… metrics of other trainers that cannot be a share of correct answers."""
    rates = select_rates({name: column.values for name, column in columns.items() if is_task_metric(name)})
    return {name: column for name, column in columns.items() if not is_task_metric(name) or name in rates}


def _inspect(log: Path) -> str:
    command = [*_find_wandb_command(log), "leet", "inspect", "--json", str(log.resolve())]
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with tempfile.TemporaryDirectory() as folder:  # the tool writes a log into its working directory
        environment["WANDB_DIR"] = folder
        try:
            result = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=_TIMEOUT_SECONDS,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise InputError(f"{log}: wandb did not finish reading within {_TIMEOUT_SECONDS} s") from None
        except OSError as error:
            raise InputError(f"{log}: wandb cannot be started: {error.strerror}") from None
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()
        raise InputError(
            f"{log}: wandb cannot read it: {lines[-1] if lines else f'exit code {result.returncode}'}",
            hint="reading offline runs needs wandb 0.31 or newer; the log may be incomplete",
        )
    return result.stdout


def _find_wandb_command(log: Path) -> list[str]:
    spec = find_spec("wandb")
    if spec is not None and spec.origin is not None:  # None for a plain folder wandb/ of offline runs
        return [sys.executable, "-m", "wandb"]
    program = shutil.which("wandb")
    if program is None:
        raise InputError(
            f"{log} is a W&B run; reading it needs wandb, which is not installed",
            hint="pip install 'wandb>=0.31', or compare run directories, which do not need it",
        )
    return [program]


def _parse(log: Path, lines: Iterable[str]) -> _Log:
    parsed = _Log()
    for line in lines:
        try:
            record = json.loads(line)
            kind = record.get("type")
            _add_record(parsed, kind, record.get(kind) if isinstance(kind, str) else None)
        except (ValueError, AttributeError, TypeError):
            raise InputError(f"{log}: unexpected output of wandb: {line[:80]!r}") from None
    parsed.rows += _assign_utilization(parsed)
    parsed.rows.sort(key=lambda row: row.step)
    if not parsed.name and not parsed.rows and not parsed.config:
        raise InputError(f"{log}: contains no run")
    return parsed


def _add_record(parsed: _Log, kind: object, body: object) -> None:
    if not isinstance(body, dict):
        return
    if kind == "run":
        parsed.name = str(body.get("display_name") or body.get("run_id") or "")
        parsed.started_at = str(body["start_time"]) if body.get("start_time") else None
        _update_config(parsed, body.get("config"))
    elif kind == "config":
        _update_config(parsed, body)
    elif kind == "exit":
        parsed.exit_code = int(body.get("exit_code") or 0)
    elif kind == "history":
        row = _make_row(body.get("item"), len(parsed.rows))
        if row is not None:
            parsed.rows.append(row)
            parsed.moments.append((_to_number(body["item"].get("_timestamp")) or 0.0, row.step))
    elif kind == "stats":
        _add_stats(parsed, body)


def _add_stats(parsed: _Log, body: Mapping[str, object]) -> None:
    """Add W&B's own system metrics, sampled every few seconds: utilization per GPU in percent."""
    item = body.get("item")
    busy = (
        [_to_number(value) for name, value in item.items() if _BUSY.fullmatch(name)] if isinstance(item, dict) else []
    )
    known = [value for value in busy if value is not None and math.isfinite(value)]
    if known:
        when = datetime.fromisoformat(str(body.get("timestamp"))).timestamp()
        parsed.utilization.append((when, math.fsum(known) / len(known) / 100))


def _assign_utilization(parsed: _Log) -> list[StepMetrics]:
    """Assign samples to the last step logged before them, unless the run logs its own utilization."""
    if any(GPU_UTILIZATION in row.values for row in parsed.rows):
        return []
    moments = sorted(parsed.moments)
    by_step: dict[int, list[float]] = {}
    for when, share in parsed.utilization:
        index = bisect_right(moments, (when, sys.maxsize)) - 1
        if index >= 0:
            by_step.setdefault(moments[index][1], []).append(share)
    return [
        StepMetrics(step=step, epoch=0.0, values={GPU_UTILIZATION: math.fsum(shares) / len(shares)})
        for step, shares in sorted(by_step.items())
    ]


def _update_config(parsed: _Log, config: object) -> None:
    update = config.get("update") if isinstance(config, dict) else None
    if isinstance(update, dict) and len(parsed.config) < _MAX_SETTINGS:
        parsed.config.update({str(key): value for key, value in update.items() if key != "_wandb"})


def _make_row(item: object, position: int) -> StepMetrics | None:
    if not isinstance(item, dict):
        return None
    numbers = {name: number for name, value in item.items() if (number := _to_number(value)) is not None}
    values = {own: number for name, number in numbers.items() if (own := _map_name(name)) is not None}
    if TOTAL_SECONDS in numbers:  # prefer the run's own clock
        values[TOTAL_SECONDS] = numbers[TOTAL_SECONDS]
    step = next((numbers[name] for name in _STEPS if name in numbers and math.isfinite(numbers[name])), position)
    logged = values.keys() - {TOTAL_SECONDS}
    return StepMetrics(step=int(step), epoch=numbers.get("train/epoch", 0.0), values=values) if logged else None


def _map_name(name: str) -> str | None:
    if name in METRICS_BY_NAME or (is_task_metric(name) and name.isascii() and name.isprintable()):
        return name
    return _ALIASES.get(name)


def _to_number(value: object) -> float | None:
    """Convert a value; W&B writes non-finite values as strings."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return math.nan if value in ("NaN", "Infinity", "-Infinity") else None


def _collect_traits(config: Mapping[str, object], columns: Mapping[str, Column]) -> Traits:
    """Collect traits by our own config keys or those of common trainers."""
    nested = flatten(dict(config)) if config else {}
    leaves = {**{key.rpartition(".")[2]: value for key, value in nested.items()}, **config}
    predicted = columns[PREDICTED_GIB].finite if PREDICTED_GIB in columns else []

    def word(*names: str) -> str | None:
        return next((value for name in names if isinstance(value := leaves.get(name), str) and value), None)

    def number(*names: str) -> int | None:
        return next((value for name in names if isinstance(value := leaves.get(name), int)), None)

    return Traits(
        expert=word("expert"),
        base=word("base", "base_model", "model_name_or_path", "model_name", "_name_or_path"),
        hardware=word("hardware"),
        data_key=word("data_key"),
        global_batch_size=number("global_batch_size"),
        sequence_length=number("sequence_length", "max_seq_length", "max_length"),
        loss_on=word("loss_on"),
        precision=word("precision"),
        random_weights=config.get("random_weights") is True,
        predicted_gib=predicted[-1] if predicted else None,
    )


def _find_num_steps(config: Mapping[str, object]) -> int | None:
    planned = flatten(dict(config)).get("plan.schedule.num_steps") if config else None
    return planned if isinstance(planned, int) else None
