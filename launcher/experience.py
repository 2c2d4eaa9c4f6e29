"""What runs on this machine have taught: which predicted sizes ran out of memory all the same. Later plans stay below.

One JSON file in LAUNCHER_CACHE_DIR, or in the user's cache folder. Delete it, and everything is forgotten.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from launcher.errors import InputError
from launcher.locking import locked
from launcher.paths import write_text_atomically
from launcher.plan.model import Plan
from launcher.values import Frozen

CACHE_DIR_VARIABLE = "LAUNCHER_CACHE_DIR"
_FILE = "experience.json"


class Failure(Frozen):
    """A plan ran out of memory that it was predicted to have."""

    predicted_bytes: int
    when: str  # ISO 8601, UTC


class Experience(Frozen):
    schema_version: Literal[1] = 1
    failures: dict[str, Failure] = Field(default_factory=dict)  # the smallest of each kind


def find_cache_folder() -> Path:
    configured = os.environ.get(CACHE_DIR_VARIABLE)
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "expert-launcher"


def name_kind(plan: Plan) -> str | None:
    """Plans whose memory goes wrong together. None: no GPU, nothing to learn."""
    gpu = plan.hardware.gpu
    if gpu is None:
        return None
    parts = (gpu.key, plan.base.name, plan.adapter.kind, plan.quantization_kind, plan.batch.sequence_length)
    return " | ".join(map(str, parts))


def load_experience() -> Experience:
    """Nothing where there is none, or none that can be read: plans are made all the same."""
    try:
        return Experience.model_validate_json((find_cache_folder() / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        return Experience()


def find_failure(plan: Plan) -> Failure | None:
    kind = name_kind(plan)
    return None if kind is None else load_experience().failures.get(kind)


def remember_failure(plan: Plan) -> None:
    """The smallest prediction that failed is what counts."""
    kind = name_kind(plan)
    if kind is None:
        return
    try:
        file = find_cache_folder() / _FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file):
            known = load_experience()
            before = known.failures.get(kind)
            if before is not None and before.predicted_bytes <= plan.memory.total_bytes:
                return
            now = datetime.now(UTC).isoformat(timespec="seconds")
            failure = Failure(predicted_bytes=plan.memory.total_bytes, when=now)
            changed = known.model_copy(update={"failures": {**known.failures, kind: failure}})
            write_text_atomically(file, changed.model_dump_json(indent=2) + "\n")
    except (OSError, InputError):
        return  # a cache that cannot be written is none
