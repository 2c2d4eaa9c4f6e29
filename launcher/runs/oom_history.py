"""OOM history of this machine: predicted sizes that ran out of memory, so that later plans stay below them.

One JSON file in LAUNCHER_CACHE_DIR or the user's cache folder; delete it to reset.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from pydantic import Field, ValidationError

from launcher.core.errors import InputError
from launcher.core.file_lock import locked
from launcher.core.frozen_model import Frozen
from launcher.core.run_paths import get_cache_folder, write_text_atomically
from launcher.plan.model import Plan

_FILE = "experience.json"


class Failure(Frozen):
    """A plan that ran out of memory although it was predicted to fit."""

    predicted_bytes: int
    when: str  # ISO 8601, UTC


class OomHistory(Frozen):
    """Content of the history file."""

    schema_version: Literal[1] = 1
    failures: dict[str, Failure] = Field(default_factory=dict)  # the smallest per configuration


def make_key(plan: Plan) -> str | None:
    """Return GPU, base, adapter, quantization and sequence length as one key of the history; None without a GPU."""
    gpu = plan.hardware.gpu
    if gpu is None:
        return None
    parts = (gpu.key, plan.base.name, plan.adapter.kind, plan.quantization_kind, plan.batch.sequence_length)
    return " | ".join(map(str, parts))


def load_history() -> OomHistory:
    """Load the history; empty if it is missing or unreadable."""
    try:
        return OomHistory.model_validate_json((get_cache_folder() / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        return OomHistory()


def find_failure(plan: Plan) -> Failure | None:
    """Return the out-of-memory failure with the smallest predicted memory for this plan's key; None without any."""
    key = make_key(plan)
    return None if key is None else load_history().failures.get(key)


def remember_failure(plan: Plan) -> None:
    """Record that a plan ran out of memory; only the smallest prediction per key is kept."""
    key = make_key(plan)
    if key is None:
        return
    try:
        file = get_cache_folder() / _FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file):
            known = load_history()
            before = known.failures.get(key)
            if before is not None and before.predicted_bytes <= plan.memory.total_bytes:
                return
            now = datetime.now(UTC).isoformat(timespec="seconds")
            failure = Failure(predicted_bytes=plan.memory.total_bytes, when=now)
            changed = known.model_copy(update={"failures": {**known.failures, key: failure}})
            write_text_atomically(file, changed.model_dump_json(indent=2) + "\n")
    except (OSError, InputError):
        return  # the history is a cache: failing to write it is not an error
