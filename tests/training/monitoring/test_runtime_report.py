"""The runtime report is read from the live process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.monitoring.runtime_report import ForwardOps, describe_runtime
from tests.training.builders import build, vary

NO_OPS = ForwardOps(attention=(), matmul_dtypes=())


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (None, "off"),
        ("layer", "per layer, in the first step"),
        ("model", "decoder, in the first step"),
    ],
)
def test_compilation_in_the_first_step_is_reported(
    plan: Plan, store: Store, tmp_path: Path, checkpointing: str, scope: str | None, expected: str
) -> None:
    """With DeepSpeed there is no warm-up step."""
    compiling: dict[str, Any] | None = None if scope is None else {"scope": scope, "backend": "eager", "mode": None}
    run = build(vary(plan, {"compile": compiling, "checkpointing": checkpointing}), store, tmp_path)
    assert describe_runtime(run, None, NO_OPS, "")["torch.compile"] == expected


def test_the_compile_result_is_reported(plan: Plan, store: Store, tmp_path: Path) -> None:
    assert describe_runtime(build(plan, store, tmp_path), None, NO_OPS, "failed")["torch.compile"] == "failed"
