"""Runs that W&B wrote offline, read by its own tool: the form of its log is not ours to know."""

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

from launcher.compare.facts import Column, RunFacts, Traits, make_columns
from launcher.compare.judged import pick_rates
from launcher.compare.settings import config_settings
from launcher.errors import InputError
from launcher.metrics import (
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
from launcher.values import flatten

_TIMEOUT_SECONDS = 120
_BUSY = re.compile(r"gpu\.\d+\.gpu")
_MOST_SETTINGS = 2_000
# How others call what we have a name for.
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
# W&B counts the calls of log(); the trainer's own count, where there is one, is the step.
_STEPS = ("train/global_step", "trainer/global_step", "global_step", "train/step", "step", "_step")


@dataclass(slots=True)
class _Log:
    """What the records told so far."""

    name: str = ""
    started_at: str | None = None
    exit_code: int | None = None
    config: dict[str, object] = field(default_factory=dict)
    rows: list[StepMetrics] = field(default_factory=list)
    moments: list[tuple[float, int]] = field(default_factory=list)  # when, and at which step
    utilization: list[tuple[float, float]] = field(default_factory=list)  # when, and how busy the GPUs were


def find_wandb_log(path: Path) -> Path | None:
    """The log of a W&B run: given itself, or by the offline-run-* directory that holds it. None: it is no such run."""
    try:
        if path.suffix == ".wandb" and path.is_file():
            return path
        logs = sorted(path.glob("run-*.wandb")) if path.is_dir() else []
    except OSError:
        return None
    return logs[0] if logs else None


def read_wandb_run(log: Path) -> RunFacts:
    """A run of W&B's offline mode, whatever trainer it was written by."""
    told = _parse(log, _inspect(log).splitlines())
    status: Literal["running", "done", "failed"] = "running"
    if told.exit_code is not None:
        status = "done" if told.exit_code == 0 else "failed"
    steps_done = max((row.step for row in told.rows), default=0)
    columns = _without_strangers(make_columns(told.rows))
    return RunFacts(
        name=told.name.strip() or log.stem.removeprefix("run-"),
        place=str(log),
        kind="wandb",
        status=status,
        traits=_find_traits(told.config, columns),
        columns=columns,
        settings=config_settings(told.config),
        started_at=told.started_at,
        steps_done=steps_done,
        num_steps=_find_num_steps(told.config),
    )


def _without_strangers(columns: dict[str, Column]) -> dict[str, Column]:
    """Whatever others call eval/…: only what can be the share of right answers is a task metric."""
    rates = pick_rates({name: column.values for name, column in columns.items() if is_task_metric(name)})
    return {name: column for name, column in columns.items() if not is_task_metric(name) or name in rates}


def _inspect(log: Path) -> str:
    command = [*_find_tool(log), "leet", "inspect", "--json", str(log.resolve())]
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with tempfile.TemporaryDirectory() as folder:  # the tool leaves a log of its own where it stands
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
            raise InputError(f"{log}: wandb did not read it within {_TIMEOUT_SECONDS} s") from None
        except OSError as error:
            raise InputError(f"{log}: wandb cannot be started: {error.strerror}") from None
    if result.returncode != 0:
        said = result.stderr.strip().splitlines()
        raise InputError(
            f"{log}: wandb cannot read it: {said[-1] if said else f'exit code {result.returncode}'}",
            hint="wandb 0.31 or newer reads offline runs by `wandb leet inspect`; is this a whole log of one?",
        )
    return result.stdout


def _find_tool(log: Path) -> list[str]:
    spec = find_spec("wandb")
    if spec is not None and spec.origin is not None:  # a folder called wandb/, as offline runs leave it, has none
        return [sys.executable, "-m", "wandb"]
    program = shutil.which("wandb")
    if program is None:
        raise InputError(
            f"{log} is a run of W&B, and wandb is not installed here, which reads it",
            hint="pip install 'wandb>=0.31', or compare run directories, which need nothing",
        )
    return [program]


def _parse(log: Path, lines: Iterable[str]) -> _Log:
    told = _Log()
    for line in lines:
        try:
            record = json.loads(line)
            kind = record.get("type")
            _take(told, kind, record.get(kind) if isinstance(kind, str) else None)
        except (ValueError, AttributeError, TypeError):
            raise InputError(f"{log}: what wandb tells of it is not understood: {line[:80]!r}") from None
    told.rows += _place_utilization(told)
    told.rows.sort(key=lambda row: row.step)
    if not told.name and not told.rows and not told.config:
        raise InputError(f"{log}: it holds no run")
    return told


def _take(told: _Log, kind: object, body: object) -> None:
    if not isinstance(body, dict):
        return
    if kind == "run":
        told.name = str(body.get("display_name") or body.get("run_id") or "")
        told.started_at = str(body["start_time"]) if body.get("start_time") else None
        _update_config(told, body.get("config"))
    elif kind == "config":
        _update_config(told, body)
    elif kind == "exit":
        told.exit_code = int(body.get("exit_code") or 0)
    elif kind == "history":
        row = _make_row(body.get("item"), len(told.rows))
        if row is not None:
            told.rows.append(row)
            told.moments.append((_to_number(body["item"].get("_timestamp")) or 0.0, row.step))
    elif kind == "stats":
        _take_stats(told, body)


def _take_stats(told: _Log, body: Mapping[str, object]) -> None:
    """What W&B itself saw of the machine, every few seconds: percentages, one a GPU."""
    item = body.get("item")
    busy = (
        [_to_number(value) for name, value in item.items() if _BUSY.fullmatch(name)] if isinstance(item, dict) else []
    )
    known = [value for value in busy if value is not None and math.isfinite(value)]
    if known:
        when = datetime.fromisoformat(str(body.get("timestamp"))).timestamp()
        told.utilization.append((when, math.fsum(known) / len(known) / 100))


def _place_utilization(told: _Log) -> list[StepMetrics]:
    """At the step that had been told last, then. A run that tells it itself knows better."""
    if any(GPU_UTILIZATION in row.values for row in told.rows):
        return []
    moments = sorted(told.moments)
    by_step: dict[int, list[float]] = {}
    for when, share in told.utilization:
        place = bisect_right(moments, (when, sys.maxsize)) - 1
        if place >= 0:
            by_step.setdefault(moments[place][1], []).append(share)
    return [
        StepMetrics(step=step, epoch=0.0, values={GPU_UTILIZATION: math.fsum(shares) / len(shares)})
        for step, shares in sorted(by_step.items())
    ]


def _update_config(told: _Log, config: object) -> None:
    update = config.get("update") if isinstance(config, dict) else None
    if isinstance(update, dict) and len(told.config) < _MOST_SETTINGS:
        told.config.update({str(key): value for key, value in update.items() if key != "_wandb"})


def _make_row(item: object, position: int) -> StepMetrics | None:
    if not isinstance(item, dict):
        return None
    numbers = {name: number for name, value in item.items() if (number := _to_number(value)) is not None}
    values = {own: number for name, number in numbers.items() if (own := _own_name(name)) is not None}
    if TOTAL_SECONDS in numbers:  # the run's own clock, rather than W&B's
        values[TOTAL_SECONDS] = numbers[TOTAL_SECONDS]
    step = next((numbers[name] for name in _STEPS if name in numbers and math.isfinite(numbers[name])), position)
    told = values.keys() - {TOTAL_SECONDS}
    return StepMetrics(step=int(step), epoch=numbers.get("train/epoch", 0.0), values=values) if told else None


def _own_name(name: str) -> str | None:
    if name in METRICS_BY_NAME or (is_task_metric(name) and name.isascii() and name.isprintable()):
        return name
    return _ALIASES.get(name)


def _to_number(value: object) -> float | None:
    """W&B writes what is no number as a word."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return math.nan if value in ("NaN", "Infinity", "-Infinity") else None


def _find_traits(config: Mapping[str, object], columns: Mapping[str, Column]) -> Traits:
    """What a config tells by names that everyone uses, or by ours: a run of ours that was tracked has them all."""
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
