"""The measurement of attention backends, with tiny shapes on the CPU."""

from __future__ import annotations

import pytest
import torch

from launcher.bench.attention import AttentionSpec
from launcher.bench.workers.attention import measure_backend
from launcher.core.choices import AttentionBackend
from launcher.plan.calibration import AttentionShape


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_backends_of_a_cpu_are_checked_and_timed(backend: AttentionBackend) -> None:
    spec = AttentionSpec(
        backend=backend,
        shape=AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype="fp32"),
        num_sequences=2,
        sequence_length=128,
        mean_tokens=40,
    )
    timing = measure_backend(spec, torch.device("cpu"), repeats=3, num_calls=1)
    assert timing.forward_ms > 0
    assert timing.milliseconds > 0
    assert timing.difference < 1e-5
    assert timing.is_deterministic
