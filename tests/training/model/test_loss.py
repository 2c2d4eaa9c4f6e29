"""Loss kernels against plain cross-entropy in fp64: values and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.core.choices import LossKernel
from launcher.training.model.loss import LOSSES, LMHead, compute_summed_loss

FEATURES, VOCABULARY = 16, 50
# The kernels make logits and their softmax in fp32 (6e-8); sums of 50 to 100 of them. Seen: 2e-7.
FP32_TOLERANCE = 1e-6
# bf16 keeps 8 bits (2**-9 = 2e-3 by rounding): inputs are the same, products and gradients are rounded. Seen: 3e-3.
BF16_TOLERANCE = 1e-2

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 3.0},
    "bias and softcap": {"bias": True, "softcap": 3.0},
}


@pytest.fixture(params=["chunked", "full_logits"])
def kernel(request: pytest.FixtureRequest) -> LossKernel:
    name: LossKernel = request.param
    return name


@dataclass(frozen=True, kw_only=True)
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    softcap: float | None


def make_case(positions: int, dtype: torch.dtype, *, bias: bool = False, softcap: float | None = None) -> Case:
    generator = torch.Generator().manual_seed(5)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype).requires_grad_()

    return Case(
        hidden=draw(positions, FEATURES),
        weight=draw(VOCABULARY, FEATURES),
        bias=draw(VOCABULARY) if bias else None,
        targets=torch.randint(0, VOCABULARY, (positions,), generator=generator),
        softcap=softcap,
    )


def grads_of(loss: Tensor, case: Case) -> list[Tensor]:
    """The loss is scaled as in a step: by the ranks and by one over the trained tokens."""
    leaves = [leaf for leaf in (case.hidden, case.weight, case.bias) if leaf is not None]
    return list(torch.autograd.grad(loss * (3.0 / 7.0), leaves))


def compute_exactly(case: Case) -> tuple[Tensor, list[Tensor]]:
    logits = case.hidden.double() @ case.weight.double().T
    if case.bias is not None:
        logits = logits + case.bias.double()
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    chosen = torch.softmax(logits, dim=-1)[torch.arange(len(case.targets)), case.targets]
    loss = -torch.log(chosen).sum()
    return loss.detach(), grads_of(loss, case)


def compute(kernel: LossKernel, case: Case) -> tuple[Tensor, list[Tensor]]:
    head = LMHead(weight=case.weight, bias=case.bias, softcap=case.softcap)
    loss = LOSSES[kernel](case.hidden, case.targets, head)
    return loss.detach(), grads_of(loss, case)


def check_same(kernel: LossKernel, case: Case, tolerance: float) -> None:
    loss, found = compute(kernel, case)
    exact, wanted = compute_exactly(case)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(exact), rel=tolerance)
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours.double() - theirs.double()).norm()) <= tolerance * float(theirs.double().norm())


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradients_match_fp64(kernel: LossKernel, dtype: torch.dtype, head: dict[str, Any]) -> None:
    check_same(kernel, make_case(11, dtype, **head), FP32_TOLERANCE)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("chunk", [1, 4, 11, 12])
def test_chunks_sum_to_the_full_loss(monkeypatch: pytest.MonkeyPatch, chunk: int, head: dict[str, Any]) -> None:
    monkeypatch.setattr("launcher.training.model.loss.count_loss_chunk", lambda _vocab, **_: chunk)
    check_same("chunked", make_case(11, torch.float32, **head), FP32_TOLERANCE)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_bf16_accumulates_in_fp32(monkeypatch: pytest.MonkeyPatch, kernel: LossKernel, head: dict[str, Any]) -> None:
    """The weight's gradient is accumulated over chunks in fp32."""
    monkeypatch.setattr("launcher.training.model.loss.count_loss_chunk", lambda _vocab, **_: 4)
    check_same(kernel, make_case(64, torch.bfloat16, **head), BF16_TOLERANCE)


def test_loss_without_trained_positions_is_zero(kernel: LossKernel) -> None:
    loss, found = compute(kernel, make_case(0, torch.float32, bias=True))
    assert float(loss) == 0.0
    assert [tuple(grad.shape) for grad in found] == [(0, FEATURES), (VOCABULARY, FEATURES), (VOCABULARY,)]
    assert all(not grad.any() for grad in found)


def test_frozen_head_gets_no_gradient(kernel: LossKernel) -> None:
    case = make_case(6, torch.float32)
    weight = case.weight.detach()
    LOSSES[kernel](case.hidden, case.targets, LMHead(weight=weight)).backward()
    assert weight.grad is None
    assert case.hidden.grad is not None


def test_frozen_hidden_states_get_no_gradient(kernel: LossKernel) -> None:
    case = make_case(6, torch.float32)
    hidden = case.hidden.detach()
    LOSSES[kernel](hidden, case.targets, LMHead(weight=case.weight)).backward()
    _, (_, wanted) = compute_exactly(case)
    assert case.weight.grad is not None
    assert torch.allclose(case.weight.grad * (3.0 / 7.0), wanted.float(), rtol=1e-5, atol=1e-6)


def test_logit_scale_is_applied(kernel: LossKernel) -> None:
    case = make_case(9, torch.float32)
    loss = compute_summed_loss(kernel, case.hidden, case.targets, LMHead(weight=case.weight, scale=0.25))
    logits = 0.25 * (case.hidden @ case.weight.T)
    assert loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(logits, case.targets, reduction="sum").item(), rel=FP32_TOLERANCE
    )


def test_autocast_computes_in_its_dtype(kernel: LossKernel) -> None:
    """fp32 weights under bf16: the loss is what bf16 gives, the gradients are fp32 again."""
    case = make_case(32, torch.float32, bias=True)
    head = LMHead(weight=case.weight, bias=case.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = compute_summed_loss(kernel, case.hidden, case.targets, head)
    exact, wanted = compute_exactly(case)
    assert loss.item() == pytest.approx(float(exact), rel=BF16_TOLERANCE)
    assert loss.item() != pytest.approx(float(exact), rel=FP32_TOLERANCE), "bf16 must have been used"
    for ours, theirs in zip(grads_of(loss, case), wanted, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < BF16_TOLERANCE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is Triton's, which runs on CUDA only")
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("positions", [0, 33])
def test_fused_matches_fp64(monkeypatch: pytest.MonkeyPatch, positions: int, head: dict[str, Any]) -> None:
    monkeypatch.setattr("launcher.training.model.loss.count_loss_chunk", lambda _vocab, **_: 16)
    case = make_case(positions, torch.float32, **head)
    hidden, weight = _to_gpu(case.hidden), _to_gpu(case.weight)
    bias = None if case.bias is None else _to_gpu(case.bias)
    on_gpu = replace(case, hidden=hidden, weight=weight, bias=bias, targets=case.targets.cuda())
    check_same("fused", on_gpu, 1e-4)


def _to_gpu(leaf: Tensor) -> Tensor:
    return leaf.detach().cuda().requires_grad_()


def test_new_rows_replace_rows_of_the_head(kernel: LossKernel) -> None:
    """As a head with these rows: values, and the gradients of the inputs, of the rows and of the frozen rest."""
    case = make_case(11, torch.float32, bias=False)
    ids = torch.tensor([2, 5])
    rows = torch.randn(2, case.weight.shape[1], requires_grad=True)
    merged = case.weight.detach().index_copy(0, ids, rows)
    wanted = torch.autograd.grad(
        LOSSES["full_logits"](case.hidden, case.targets, LMHead(weight=merged)), (case.hidden, rows)
    )
    head = LMHead(weight=case.weight.detach(), new_ids=ids, new_rows=rows)
    found = torch.autograd.grad(LOSSES[kernel](case.hidden, case.targets, head), (case.hidden, rows))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("dtype", "is_trained", "is_large"),
    [
        (torch.float32, True, True),
        (torch.float32, False, False),
        (torch.bfloat16, True, False),
    ],
    ids=["FP32", "frozen", "BF16"],
)
def test_only_a_head_that_is_trained_in_fp32_has_large_chunks(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_trained: bool, is_large: bool
) -> None:
    """Others would need memory that the plan does not count."""
    asked: list[bool] = []

    def record(_vocabulary: int, *, is_large: bool) -> int:
        asked.append(is_large)
        return 4

    monkeypatch.setattr("launcher.training.model.loss.count_loss_chunk", record)
    hidden, targets = torch.randn(6, FEATURES, dtype=torch.bfloat16, requires_grad=True), torch.zeros(6).long()
    head = LMHead(weight=torch.randn(VOCABULARY, FEATURES, dtype=dtype, requires_grad=is_trained))
    with torch.autocast("cpu", torch.bfloat16):
        compute_summed_loss("chunked", hidden, targets, head).backward()
    assert asked == [is_large]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        compute_summed_loss("chunked", hidden, targets, head)
    assert asked == [is_large, False]
    with torch.autocast("cpu", enabled=False):
        compute_summed_loss("chunked", hidden.to(dtype), targets, head).backward()
    assert asked[-1] is False
