"""What a trace says, in words."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch", reason="pip install 'expert-launcher[train]'")

from launcher.training.profile_summary import Cost, Span, describe_waiting, find_kind, render_summary, sum_up
from tests.conftest import ROOT


def span(start: float, end: float) -> Span:
    return Span(name="kernel", start=start, end=end)


def test_kernels_that_overlap_count_once() -> None:
    spans = [span(0.0, 0.4), span(0.2, 0.5), span(0.3, 0.35), span(0.8, 1.0)]
    summary = sum_up(10, 11, 1.0, [Cost(name="x", seconds=0.9, count=2)], spans)
    assert summary.waited_seconds == pytest.approx(0.3)
    assert "waited for 30.0 % of it: the host is the limit" in describe_waiting(summary)


def test_waiting_is_told_of_steps_that_nobody_traced() -> None:
    """Tracing made two steps of 0.5 s last 1.2 s between kernels; these took 0.96 s in all."""
    spans = [span(10.0, 10.48), span(10.7, 11.18), span(11.18, 11.2)]
    summary = sum_up(7, 8, 9.0, [Cost(name="x", seconds=0.98, count=3)], spans, [9.0, 0.5, 0.5, 0.5])
    assert summary.seconds == pytest.approx(1.2)
    assert summary.waiting_share == pytest.approx(0.02)
    words = "Untraced steps took 500.0 ms, of which the GPU waited for 2.0 %: it is the limit"
    assert words in describe_waiting(summary)
    alone = sum_up(7, 8, 9.0, [Cost(name="x", seconds=0.98, count=3)], spans)
    assert alone.waiting_share == pytest.approx(0.22 / 1.2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("_differentiate", "loss"),
        ("_turn_back", "fused pointwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "fused pointwise"),
        ("triton_poi_fused_mul_silu_1", "fused pointwise"),
        ("something_else", "others"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert find_kind(name) == kind


def test_every_kernel_of_ours_has_a_kind() -> None:
    files = [*(ROOT / "launcher/training").glob("*kernel*.py"), ROOT / "launcher/training/attention_tiles.py"]
    launched = {name for file in files for name in re.findall(r"(\w+)\[(?:\(.+\)|grid)\]\(", file.read_text())}
    assert len(launched) >= 13
    assert {name for name in launched if find_kind(name) == "others"} == set()


def test_the_costliest_come_first_by_step() -> None:
    costs = [Cost(name=f"gemm_{index}", seconds=index / 100, count=4) for index in range(1, 14)]
    text = render_summary(sum_up(3, 4, 9.0, costs, [span(0.0, 0.99), span(0.99, 1.0)]))
    rows = [line for line in text.splitlines() if line.startswith("| `gemm_")]
    assert len(rows) == 10
    assert rows[0] == "| `gemm_13` | 65.00 | 14.3 % | 2 |"
    assert "500.0 ms a step" in text
    assert "it is the limit" in text


def test_without_a_gpu_nothing_is_said_of_one() -> None:
    summary = sum_up(1, 1, 1.0, [Cost(name="aten::mm", seconds=0.5, count=1)], [])
    assert summary.waited_seconds is None
    assert "no GPU" in render_summary(summary)
