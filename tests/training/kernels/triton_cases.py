"""The Triton kernels against plain torch, as a separate program: Triton decides at import whether it interprets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from launcher.training.kernels import (
    cross_entropy_triton,
    decode_attention_triton,
    elementwise,
    fp8,
    fp8_matmul_triton,
    fp8_triton,
    fused_lora_triton,
    nf4_triton,
    rmsnorm_dropout_triton,
    rope_swiglu_triton,
    stochastic_rounding,
    stochastic_rounding_triton,
)
from launcher.training.kernels.elementwise import Correction, QKNormRope
from launcher.training.kernels.fp8 import Fp8Rows, LoraTerm, UnroundedGrads
from launcher.training.kernels.nf4 import GROUP_SIZE, OUTER_GROUP_SIZE, Nf4Weights, dequantize
from launcher.training.kernels.seeded_dropout import DropoutSeed


def check_all(device: str) -> None:
    torch.manual_seed(0)
    check_stochastic_rounding(device)
    on_gpu = ((9, 3, 64), (4, 4, 80), (20, 1, 128), (8, 4, 256))
    for heads, kv_heads, head_dim in on_gpu if device == "cuda" else ((6, 2, 64), (1, 1, 80)):  # slow there
        check_decode_attention(device, heads, kv_heads, head_dim)
    check_rms_norm(device)
    check_lora_copy(device)
    for out_features, ranks in (([40, 24, 16], 16), ([700, 700], 16), ([130], 8)):
        check_split_lora_grads(device, out_features, ranks)
    check_split_lora_grads(device, [40, 24, 16], 16, (3,), (37,))
    check_split_lora_grads(device, [40, 24], 16, (1,), (16,))
    check_row_norms(device, 12)
    check_row_norms(device, 72)  # more than a tile
    for num_in, num_out, ranks in ((128, 384, 8), (2048, 24, 48), (72, 512, 24), (576, 192, 0), (64, 3, 0)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16) if device == "cuda" else (torch.float32,):
            check_dequantize(device, num_in, num_out, ranks, dtype)
    if device == "cpu":  # the interpreter truncates to bf16 instead of rounding
        check_dequantize(device, 72, 512, 24, torch.float16)
    for splits in (False, True):
        check_dropout(device, splits)
    with use_few_tokens(device) as num_tokens:
        check_sums_over_tokens(device, num_tokens)
    for softcap in (None, 5.0):
        check_cross_entropy(device, softcap)
    check_fp8_rounding(device)
    check_fp8_adapter_in_bf16(device)
    for ranks in (24, 40, 72):
        check_fp8_adapter(device, ranks)
        check_fp8_matmul(device, ranks, 150, 304)
        for num_tokens, num_outputs in ((12_000, 304), (20_000, 1504)) if device == "cuda" else ():
            check_fp8_matmul(device, ranks, num_tokens, num_outputs)  # several tiles per program
    for ranks in (4, 36) if device == "cuda" else ():  # no multiple of 16 bytes
        check_fp8_matmul(device, ranks, 1000, 304)
    check_split_projection(device)


@contextmanager
def use_few_tokens(device: str) -> Iterator[int]:
    """Yield a number of tokens for two programs that sum over tokens: fewer each in the interpreter, which is slow."""
    if device == "cuda":
        yield 150
        return
    with ExitStack() as stack:
        for module in (rmsnorm_dropout_triton, rope_swiglu_triton):
            assert module._REDUCTION_TILE == (16, 8)
            stack.enter_context(mock.patch.object(module, "_REDUCTION_TILE", (16, 2)))
        yield 40


def check_sums_over_tokens(device: str, num_tokens: int) -> None:
    for added in (False, True):
        check_scale_columns(device, num_tokens, added)
    for halves in (1, 2):
        check_swiglu(device, num_tokens, scaled=True, added=halves)
    for scaled, added in ((False, False), (True, False), (True, True)):
        if not added:
            check_swiglu(device, num_tokens, scaled)
            check_swiglu(device, num_tokens, scaled, is_gelu=True)
        for normed in (False, True):
            check_qk_norm_rope(device, num_tokens, scaled, normed, added)


def check_stochastic_rounding(device: str) -> None:
    """Bits of keys on both sides of the int32 range, and of indices beyond it."""
    values = torch.randn(5000)
    for key, start in ((3, 0), ((1 << 32) - 5, 1 << 24), (1 << 31, (1 << 31) - 100)):
        rounded = stochastic_rounding_triton.round_stochastically_triton(values.to(device), key, start)
        assert torch.equal(rounded.cpu(), stochastic_rounding.round_stochastically(values, key, start))


def check_decode_attention(device: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Rows with padding, with unused room at the end, with a gap, and with one visible token."""
    length = 700
    mask = torch.zeros(4, 1, 1, length, dtype=torch.bool)
    for row, (start, end) in enumerate(((0, length), (37, 600), (500, 564), (699, 700))):
        mask[row, ..., start:end] = True
    mask[0, ..., 100:300] = False
    sizes = (heads, 1), (kv_heads, length), (kv_heads, length)
    q, k, v = (torch.randn(4, count, size, head_dim) for count, size in sizes)
    exact = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    for num_programs in (1, 40):
        for dtype, tolerance in ((torch.float32, 1e-5), *([(torch.bfloat16, 0.01)] if device == "cuda" else [])):
            with mock.patch.object(decode_attention_triton, "_PROGRAMS_PER_SM", num_programs):
                output = decode_attention_triton.decode_attention(
                    q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), mask[:, 0, 0].to(device), 0.3
                )
            assert_close(output, exact.transpose(1, 2), tolerance)


def check_rms_norm(device: str) -> None:
    x, weight = torch.randn(37, 200), torch.randn(200)
    expected = torch.zeros(37, 208)
    actual = expected.clone().to(device)
    elementwise.rms_norm(x, weight, 1e-5, expected)
    rmsnorm_dropout_triton.rms_norm(x.to(device), weight.to(device), 1e-5, actual)
    assert_close(actual, expected)
    rmsnorm_dropout_triton.copy_rows(x.to(device), actual)
    assert_close(actual[:, :200], x)
    grad = torch.randn(37, 200)
    actual = torch.empty_like(x, device=device)
    rmsnorm_dropout_triton.rms_norm_backward(grad.to(device), x.to(device), weight.to(device), 1e-5, actual)
    assert_close(actual, elementwise.rms_norm_backward_torch(grad, x, weight, 1e-5))


def check_dropout(device: str, splits: bool) -> None:
    """Exactly the same elements are dropped as in torch."""
    x, weight = torch.randn(37, 600), torch.randn(600)
    cpu_seed, seed = (DropoutSeed(torch.tensor([7_654_321], dtype=torch.int32).to(to), 0.3) for to in ("cpu", device))
    expected, expected_side = torch.zeros(37, 608), torch.zeros(37, 600)
    actual, side = expected.clone().to(device), expected_side.clone().to(device)
    expected_normed, normed = (torch.zeros(37, 600, device=to) if splits else None for to in ("cpu", device))
    on_device = x.to(device)
    elementwise.rms_norm_dropout(
        x, weight, 1e-5, expected, expected_side, cpu_seed, splits=splits, normed=expected_normed
    )
    rmsnorm_dropout_triton.rms_norm(on_device, weight.to(device), 1e-5, actual, seed, side, normed, splits)
    assert_close(actual, expected)
    assert_close(side, expected_side)
    assert_close(normed, expected_normed)
    assert torch.equal(side.cpu() == 0, expected_side == 0)
    for ours, theirs in ((on_device, x), (actual[:, :600], expected[:, :600])):  # the second in place
        elementwise.dropout(theirs, expected, cpu_seed, expected_side if splits else None)
        rmsnorm_dropout_triton.dropout(ours, actual, seed, side if splits else None)
        assert_close(actual, expected)
        assert_close(side, expected_side)
    grad, dropped = torch.randn(37, 600), torch.randn(37, 600)
    on_device = grad.clone().to(device)
    rmsnorm_dropout_triton.dropout_backward(on_device, dropped.to(device), seed, splits=splits)
    elementwise.dropout_backward(grad, dropped, cpu_seed, splits=splits)
    assert_close(on_device, grad)


def check_lora_copy(device: str) -> None:
    matrices = [torch.randn(shape, device=device) for shape in ((3, 40), (40, 5), (700, 16))]
    targets = [torch.zeros(2000, 80, device=device)[: len(one), 7 : 7 + one.shape[1]] for one in matrices]
    divisors = None, None, 0.5 + torch.rand(700, device=device)
    copies = list(zip(matrices, targets, (1.0, 2.0, 0.5), divisors, strict=True))
    fused_lora_triton.LoraCopy(copies)()
    for matrix, target, scale, divisor in copies:
        expected = matrix * scale if divisor is None else matrix * scale / divisor[:, None]
        assert_close(target, expected.cpu())


def check_split_lora_grads(
    device: str, out_features: list[int], ranks: int, a_parts: tuple[int, ...] = (), b_parts: tuple[int, ...] = ()
) -> None:
    """Gradients, or parts of them that are summed."""
    rank = 5  # smaller than the padded number of columns
    a_grads, b_grads = torch.randn(*a_parts, ranks, 300), torch.randn(*b_parts, sum(out_features), ranks)
    expected = elementwise.split_lora_grads(a_grads, b_grads, out_features, 0.5, rank)
    actual = tuple(torch.empty_like(one, device=device) for one in expected)
    fused_lora_triton.split_lora_grads(a_grads.to(device), b_grads.to(device), out_features, 0.5, *actual)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs)


def check_row_norms(device: str, ranks: int) -> None:
    matrix = torch.randn(70 + ranks, 40 + ranks, device=device)
    weight, lora_a, scaled_b = matrix[:70, :40], matrix[70:, :40], matrix[:70, 40:]
    actual = torch.empty(70, device=device)
    fused_lora_triton.compute_row_norms(weight, lora_a, scaled_b, weight.square().sum(1), actual)
    assert_close(actual, (weight + scaled_b @ lora_a).norm(dim=1).cpu())


def check_dequantize(device: str, num_in: int, num_out: int, ranks: int, dtype: torch.dtype) -> None:
    """Bit-identical: these are the base's weights."""
    num_weights = num_in * num_out
    num_groups = num_weights // GROUP_SIZE
    num_outer = -(-num_groups // OUTER_GROUP_SIZE)
    stored = Nf4Weights(
        torch.randint(0, 256, (num_weights // 2,), dtype=torch.uint8),
        torch.randn(16),
        torch.randint(0, 256, (num_groups,), dtype=torch.uint8),
        torch.randn(256),
        torch.randn(num_outer),
        torch.randn(num_outer),
        torch.randn(num_out, ranks).to(dtype),
        torch.randn(ranks, num_in + ranks).to(dtype),
    )
    actual = torch.empty(num_out + ranks, num_in + ranks, dtype=dtype, device=device)
    nf4_triton.dequantize_into(actual, Nf4Weights(*(tensor.to(device) for tensor in stored)))
    assert torch.equal(actual.cpu(), dequantize(*stored, None))


def check_scale_columns(device: str, num_tokens: int, added: bool) -> None:
    """The input is a view of a wider tensor."""
    y, correction = torch.randn(num_tokens, 700)[:, 40:640], torch.randn(num_tokens, 600)
    scales, grad = torch.rand(600) + 0.5, torch.randn(num_tokens, 600)
    on_device, on_scales = y.to(device), scales.to(device)
    expected, actual = torch.empty(num_tokens, 600), torch.empty(num_tokens, 600, device=device)
    elementwise.scale_columns(y, scales, correction if added else None, expected)
    rmsnorm_dropout_triton.scale_columns(on_device, on_scales, correction.to(device) if added else None, actual)
    assert_close(actual, expected)
    expected_scale_grad = elementwise.scale_columns_backward(grad, y, scales, expected)
    actual_scale_grad = rmsnorm_dropout_triton.scale_columns_backward(grad.to(device), on_device, on_scales, actual)
    assert_close(actual, expected)
    assert_close(actual_scale_grad, expected_scale_grad)


def check_swiglu(device: str, num_tokens: int, scaled: bool, added: int = 0, *, is_gelu: bool = False) -> None:
    """`added`: the correction is for neither gate nor up (0), for up (1), for both (2)."""
    width, ranks = 200, 8
    gate_up = torch.randn(num_tokens, 2 * width)
    scales = torch.rand(2 * width) + 0.5 if scaled else None
    expected, actual = torch.zeros(num_tokens, width + ranks), torch.zeros(num_tokens, width + ranks, device=device)
    correction, on_correction = _make_corrections(gate_up[:, : added * width], device) if added else (None, None)
    elementwise.swiglu(gate_up, scales, expected, correction and correction.value, is_gelu=is_gelu)
    on_value = on_correction and on_correction.value
    rope_swiglu_triton.swiglu(gate_up.to(device), _to(scales, device), actual, on_value, is_gelu=is_gelu)
    assert_close(actual, expected)
    grad = torch.randn(num_tokens, width)
    on_device = grad.clone().to(device)
    expected = torch.zeros(num_tokens, 2 * width + ranks)
    actual = expected.clone().to(device)
    expected_scale_grad = elementwise.swiglu_backward(grad, gate_up, scales, expected, correction, is_gelu=is_gelu)
    actual_scale_grad = rope_swiglu_triton.swiglu_backward(
        on_device, gate_up.to(device), _to(scales, device), actual, on_correction, is_gelu=is_gelu
    )
    assert_close(actual, expected)
    assert_close(on_correction and on_correction.grad, correction and correction.grad)
    assert_close(on_device, grad)
    assert_close(actual_scale_grad, expected_scale_grad)


def check_qk_norm_rope(device: str, num_tokens: int, scaled: bool, normed: bool, added: bool) -> None:
    num_heads, num_kv_heads, head_dim, ranks = 2, 1, 32, 12
    num_features = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, num_features)
    angles = torch.rand(num_tokens, head_dim // 2).repeat(1, 2) * 3
    rope = QKNormRope(
        dora_scale=torch.rand(num_features) + 0.5 if scaled else None,
        q_norm=torch.randn(head_dim) if normed else None,
        k_norm=torch.randn(head_dim) if normed else None,
        cos=angles.cos(),
        sin=angles.sin(),
        eps=1e-5,
    )
    norms = None if rope.norms is None else (rope.norms[0].to(device), rope.norms[1].to(device))
    inputs = qkv.to(device), _to(rope.dora_scale, device), norms, rope.cos.to(device), rope.sin.to(device), rope.eps
    correction, on_correction = _make_corrections(qkv, device) if added else (None, None)
    expected = elementwise.qk_norm_rope(qkv, rope, num_heads, num_kv_heads, correction and correction.value)
    actual = tuple(None if one is None else torch.empty_like(one, device=device) for one in expected)
    rope_swiglu_triton.qk_norm_rope(*inputs, actual, on_correction and on_correction.value)  # type: ignore[arg-type]
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs)
    grads = [torch.randn(num_tokens, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    grad_ext = torch.zeros(num_tokens, num_features + ranks)
    on_device = grad_ext.clone().to(device)
    expected_scale_grad = elementwise.qk_norm_rope_backward(tuple(grads), qkv, rope, grad_ext, correction)  # type: ignore[arg-type]
    on_grads = tuple(grad.to(device) for grad in grads)
    actual_scale_grad = rope_swiglu_triton.qk_norm_rope_backward(on_grads, *inputs, on_device, on_correction)  # type: ignore[arg-type]
    assert_close(on_device, grad_ext)
    assert_close(on_correction and on_correction.grad, correction and correction.grad)
    assert_close(actual_scale_grad, expected_scale_grad)


def check_cross_entropy(device: str, softcap: float | None) -> None:
    logits = torch.randn(7, 1000) * 3
    targets = torch.randint(0, 1000, (7,))
    targets[3] = -1  # ignored
    leaf = logits.clone().requires_grad_()
    capped = leaf if softcap is None else torch.tanh(leaf / softcap) * softcap
    losses = functional.cross_entropy(capped, targets, ignore_index=-1, reduction="none")
    losses.sum().backward()
    on_device = logits.clone().to(device)
    assert_close(cross_entropy_triton.cross_entropy_in_place(on_device, targets.to(device), softcap), losses.detach())
    assert_close(on_device, leaf.grad)


def check_fp8_rounding(device: str) -> None:
    """The same codes as in torch; the interpreter's conversion truncates, and is wrong next to powers of two."""
    num_rows = 37 if device == "cuda" else 9  # a program per row
    x, weight, columns = torch.randn(num_rows, 200), torch.randn(200), torch.rand(200)
    x[:3] *= torch.tensor([0.0, 1e-38, 1e-31])[:, None]  # rounded to zeros, not to NaN
    gate_up, scale = torch.randn(num_rows, 144), torch.rand(144)
    pairs = [
        (fp8_triton.quantize_rows(x.to(device), None), fp8.quantize_rows(x)),
        (fp8_triton.quantize_rows(x.to(device), columns.to(device)), fp8.quantize_rows(x, columns)),
        (fp8_triton.quantize_rows(x.to(device), weight.to(device), 1e-5), fp8.rms_norm(x, weight, 1e-5)),
    ]
    for is_gelu in (False, True):
        for dora_scale in (None, scale):
            ours = fp8_triton.swiglu(gate_up.to(device), _to(dora_scale, device), is_gelu=is_gelu)
            pairs.append((ours, fp8.swiglu(gate_up, dora_scale, is_gelu=is_gelu)))
        for keeps_grads in (False, True):
            grad = torch.randn(num_rows, 72)
            on_device = grad.to(device, copy=True)
            unrounded, kept = (torch.zeros_like(gate_up), torch.zeros_like(gate_up, device=device))
            ours = fp8_triton.swiglu_backward(
                *(on_device, gate_up.to(device), scale.to(device)),
                is_gelu=is_gelu,
                unrounded=kept if keeps_grads else None,
            )
            expected = fp8.swiglu_backward(grad, gate_up, scale, is_gelu=is_gelu, unrounded=unrounded)
            pairs.append((ours, expected))
            assert_close(on_device, grad)
            if keeps_grads:
                assert_close(kept, unrounded)
    for normed in (False, True):
        for keeps_grads in (False, True):
            pairs.append(_compare_rope_backward(device, num_rows, normed, keeps_grads))
    for (codes, scales), expected in pairs:
        assert_close(scales, expected.scales)
        values, theirs = codes.cpu().float(), expected.codes.float()
        if device == "cuda":  # fp32 values differ in their last bit, which rarely changes the code
            assert float((values != theirs).float().mean()) < 1e-3
        assert_close(values, theirs, 0.1 if device == "cpu" else 2e-3)


def _compare_rope_backward(
    device: str, num_rows: int, normed: bool, keeps_grads: bool
) -> tuple[tuple[Tensor, Tensor], Fp8Rows]:
    """Five query heads and two of keys and values: their sum is no power of two."""
    grads = torch.randn(num_rows, 5, 32), torch.randn(num_rows, 2, 32), torch.randn(num_rows, 2, 32)
    qkv, factors = torch.randn(num_rows, 9 * 32), torch.rand(9 * 32)
    cos, sin = torch.randn(2, num_rows, 16).repeat(1, 1, 2)
    q_norm, k_norm = (torch.randn(32), torch.randn(32)) if normed else (None, None)
    rope = QKNormRope(None, q_norm, k_norm, cos, sin, 1e-5)
    unrounded, kept = (
        UnroundedGrads.allocate(torch.empty_like(qkv, device=where), qkv.shape[1], 32, has_norms=normed)
        for where in ("cpu", device)
    )
    expected = fp8.qk_norm_rope_backward(grads, qkv, rope, factors, unrounded)
    norms = None if rope.norms is None else (rope.norms[0].to(device), rope.norms[1].to(device))
    on_device = grads[0].to(device), grads[1].to(device), grads[2].to(device)
    ours = fp8_triton.qk_norm_rope_backward(
        *(on_device, qkv.to(device), norms, cos.to(device), sin.to(device), 1e-5, factors.to(device)),
        kept if keeps_grads else None,
    )
    if keeps_grads:
        assert_close(kept.qkv, unrounded.qkv)
        if kept.norms is not None and unrounded.norms is not None:
            assert_close(kept.norms.sum(0), unrounded.norms.sum(0))
    return ours, expected


def check_fp8_adapter(device: str, ranks: int) -> None:
    rows = fp8.quantize_rows(torch.randn(150, 208))
    codes, scales = (one.to(device) for one in rows)
    lora_a, scaled_b, columns = torch.randn(ranks, 208), torch.randn(208, ranks), 0.5 + torch.rand(208)
    ours = fp8_matmul_triton.project_rows(codes, scales, lora_a.to(device).t())
    assert_close(ours, fp8.project_rows(rows, lora_a), _tolerance(device))
    ours = fp8_matmul_triton.project_rows(codes, scales, scaled_b.to(device))
    assert_close(ours, fp8.project_grad_rows(rows, scaled_b), _tolerance(device))
    left = torch.randn(150, ranks)
    ours = fp8_matmul_triton.sum_products(codes, scales, left.to(device), None, transposed=False)
    assert_close(ours.sum(0), fp8.lora_A_grad(rows, left), _tolerance(device))
    ours = fp8_matmul_triton.sum_products(codes, scales, left.to(device), columns.to(device), transposed=True)
    assert_close(ours.sum(0), fp8.lora_B_grad(rows, left, columns), _tolerance(device))
    assert torch.equal(fp8_matmul_triton.transpose(codes).cpu().float(), rows.codes.t().float())


def check_split_projection(device: str) -> None:
    """Few tokens with many inputs: several programs add up one projection."""
    rows, lora_a = fp8.quantize_rows(torch.randn(70, 4100)), 0.1 * torch.randn(24, 4100)
    with mock.patch.object(fp8_matmul_triton, "_count_multiprocessors", return_value=132):
        ours = fp8_matmul_triton.project_rows(rows.codes.to(device), rows.scales.to(device), lora_a.to(device).t())
    assert_close(ours, fp8.project_rows(rows, lora_a), _tolerance(device))


def check_fp8_adapter_in_bf16(device: str) -> None:
    """Small gradients, and rows without any, more than one program sums."""
    if device == "cpu":  # the interpreter has no matmul in BF16
        return
    grad = 1e-7 * torch.randn(500, 208)
    grad[:300] = 0
    columns, left, scaled_b = 0.5 + torch.rand(208), torch.randn(500, 24), 0.01 * torch.randn(208, 24)
    rows = fp8.quantize_rows(grad, columns)
    codes, scales, left_16 = rows.codes.to(device), rows.scales.to(device), left.to(device, torch.bfloat16)
    ours = fp8_matmul_triton.sum_products(codes, scales, left_16, columns.to(device), transposed=True)
    assert_close(ours.sum(0), fp8.lora_B_grad(rows, left, columns), 2e-2)
    ours = fp8_matmul_triton.sum_products(codes, scales, left_16, None, transposed=False)
    assert_close(ours.sum(0), fp8.lora_A_grad(rows, left), 2e-2)
    ours = fp8_matmul_triton.project_rows(codes, scales, scaled_b.to(device, torch.bfloat16))
    assert_close(ours, fp8.project_grad_rows(rows, scaled_b), 2e-2)


def check_fp8_matmul(device: str, ranks: int, num_tokens: int, num_outputs: int) -> None:
    """Forward and backward, with and without LoRA; sizes that are no multiple of a tile."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        return
    rows, weight = fp8.quantize_rows(torch.randn(num_tokens, 208)), fp8.quantize_rows(torch.randn(num_outputs, 208))
    left, right = torch.randn(num_tokens, ranks), torch.randn(num_outputs, ranks)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for scales in (None, weight.scales):
        for term in (None, LoraTerm(left, right, True), LoraTerm(left, right.t().contiguous(), False)):
            lora = None
            if term is not None:
                lora = LoraTerm(term.left.to(device, dtype), term.right.to(device, dtype), term.is_transposed)
            codes, x_scales = rows.codes.to(device), rows.scales.to(device)
            ours = fp8_matmul_triton.matmul(codes, x_scales, weight.codes.to(device), _to(scales, device), dtype, lora)
            assert_close(ours, fp8.matmul(rows, weight.codes, scales, torch.float32, term), 5e-3)


def _tolerance(device: str) -> float:
    return 1e-5 if device == "cpu" else 2e-3  # TF32 on a GPU


def assert_close(actual: Tensor | None, expected: Tensor | None, tolerance: float = 1e-5) -> None:
    if expected is None or actual is None:
        assert actual is expected, "only one of the two returns a tensor"
        return
    difference = float((actual.cpu().to(expected) - expected).norm() / expected.norm())
    assert difference < tolerance, difference


def _make_corrections(states: Tensor, device: str) -> tuple[Correction, Correction]:
    """Return a correction with a buffer for its gradient on the CPU, and a copy on the device."""
    value = torch.randn(states.shape)
    return Correction(value, torch.zeros_like(value)), Correction(
        value.to(device), torch.zeros_like(value, device=device)
    )


def _to(tensor: Tensor | None, device: str) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


if __name__ == "__main__":
    check_all(sys.argv[1])
