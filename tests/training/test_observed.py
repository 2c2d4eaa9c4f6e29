"""What the banner says, looked up in the live process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.observed import Operations, observe
from tests.training.builders import build, vary

NO_OPERATIONS = Operations(attention=(), products=())


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("scope", "told"),
    [
        (None, "off"),
        ("layer", "each layer, in the first step"),
        ("model", "the whole decoder, in the first step"),
    ],
)
def test_what_is_not_compiled_yet_is_told(
    plan: Plan, store: Store, tmp_path: Path, checkpointing: str, scope: str | None, told: str
) -> None:
    """Under DeepSpeed nothing can be compiled ahead."""
    compiling: dict[str, Any] | None = None if scope is None else {"scope": scope, "backend": "eager", "mode": None}
    run = build(vary(plan, {"compile": compiling, "checkpointing": checkpointing}), store, tmp_path)
    assert observe(run, None, NO_OPERATIONS, "")["torch.compile"] == told


def test_what_was_compiled_is_told_as_it_was(plan: Plan, store: Store, tmp_path: Path) -> None:
    assert observe(build(plan, store, tmp_path), None, NO_OPERATIONS, "failed")["torch.compile"] == "failed"
