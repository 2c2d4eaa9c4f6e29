"""The summary of a profiler trace."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch", reason="pip install 'expert-launcher[train]'")

from launcher.training.observers.profiler import (
    Cost,
    classify_kernel,
    describe_idle_time,
    render_summary,
    summarize,
)
from tests.conftest import ROOT


def test_kernels_that_overlap_count_once() -> None:
    spans = [(0.0, 0.4), (0.2, 0.5), (0.3, 0.35), (0.8, 1.0)]
    summary = summarize(10, 11, 1.0, [Cost(name="x", seconds=0.9, count=2)], spans)
    assert summary.idle_seconds == pytest.approx(0.3)
    assert "was idle for 30.0 % of it: the host is the bottleneck" in describe_idle_time(summary)


def test_idle_time_refers_to_untraced_steps() -> None:
    """Tracing stretches two steps of 0.5 s to 1.2 s; their kernels take 0.98 s in total."""
    spans = [(10.0, 10.48), (10.7, 11.18), (11.18, 11.2)]
    summary = summarize(7, 8, 9.0, [Cost(name="x", seconds=0.98, count=3)], spans, [9.0, 0.5, 0.5, 0.5])
    assert summary.seconds == pytest.approx(1.2)
    assert summary.idle_share == pytest.approx(0.02)
    words = "Untraced steps took 500.0 ms, of which the GPU was idle for 2.0 %: the GPU is the bottleneck"
    assert words in describe_idle_time(summary)
    alone = summarize(7, 8, 9.0, [Cost(name="x", seconds=0.98, count=3)], spans)
    assert alone.idle_share == pytest.approx(0.22 / 1.2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matmuls"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("_cross_entropy_backward_kernel", "loss"),
        ("_qk_norm_rope_backward_kernel", "fused pointwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "fused pointwise"),
        ("triton_poi_fused_mul_silu_1", "fused pointwise"),
        ("something_else", "others"),
    ],
)
def test_kernels_are_classified(name: str, kind: str) -> None:
    assert classify_kernel(name) == kind


def test_every_own_kernel_has_a_kind() -> None:
    kernels = ROOT / "launcher/training/kernels"
    files = [*kernels.glob("*_triton.py"), kernels / "varlen_attention.py"]
    launched = {name for file in files for name in re.findall(r"(\w+)\[(?:\(.+\)|grid)\]\(", file.read_text())}
    assert len(launched) >= 13
    assert {name for name in launched if classify_kernel(name) == "others"} == set()


def test_kernels_are_sorted_by_time_per_step() -> None:
    costs = [Cost(name=f"gemm_{index}", seconds=index / 100, count=4) for index in range(1, 14)]
    text = render_summary(summarize(3, 4, 9.0, costs, [(0.0, 0.99), (0.99, 1.0)]))
    rows = [line for line in text.splitlines() if line.startswith("| `gemm_")]
    assert len(rows) == 10
    assert rows[0] == "| `gemm_13` | 65.00 | 14.3 % | 2 |"
    assert "500.0 ms per step" in text
    assert "the GPU is the bottleneck" in text


def test_without_a_gpu_there_is_no_idle_time() -> None:
    summary = summarize(1, 1, 1.0, [Cost(name="aten::mm", seconds=0.5, count=1)], [])
    assert summary.idle_seconds is None
    assert "No GPU" in render_summary(summary)
