"""The fused weight of the linear layers that share an input, for example q_proj, k_proj and v_proj.

    [ W  s B ]   out features     y  = [x, x A^T] [W, s B]^T
    [ A   0  ]   ranks            dx = [dy, dy s B] [W; A]

W, A and s B of the layers are stacked; B is block-diagonal. The base's weights live inside the fused weight (in NF4
and FP8 next to it, see kernels/nf4.py and kernels/fp8.py), and their layers hold views of it. A and B are copied into
it whenever they change; the parameters, their names and PEFT's files stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from launcher.plan.estimate.memory.recipe import count_fused_ranks
from launcher.training.kernels.availability import supports_triton
from launcher.training.kernels.fp8 import Fp8Weights
from launcher.training.kernels.fused_layer_autograd import LoraBlockShape
from launcher.training.kernels.nf4 import (
    StoredWeights,
    concat_4bit_weights,
    is_fp8,
    is_fusable_4bit,
    is_lora_4bit,
    materialize,
)
from launcher.training.model.fused_lora.fp8_base import can_round, round_linears

ADAPTER_NAME = "default"


@dataclass(eq=False)
class DoraNorms:
    """Row norms that DoRA divides by, in fp32."""

    row_norms: Tensor  # ||W + s B A||
    base_squares: Tensor  # ||W||^2


@dataclass(eq=False)
class PlainLinear:
    """A layer without an adapter that shares a fused weight with adapted layers: its A and B are zero."""

    base_layer: Any

    @property
    def in_features(self) -> int:
        """Input features of the layer."""
        return int(self.base_layer.in_features)

    @property
    def out_features(self) -> int:
        """Output features of the layer."""
        return int(self.base_layer.out_features)


class LoraPart(NamedTuple):
    """A LoRA parameter and the view of a fused weight that holds source * scale, or source * scale / divisors."""

    source: Tensor
    target: Tensor
    scale: float
    divisors: Tensor | None = None  # one per row


@dataclass(eq=False)
class FusedLoraWeights:
    """The fused weight of layers that share an input, and its outputs until each adapted layer has fetched its own.

    All adapted members have the same hyperparameters (see get_fusion_key).
    """

    members: list[Any]  # PEFT's LoRA layers, or PlainLinear
    stored: StoredWeights
    shape: LoraBlockShape
    clones_last_output: bool  # saved for backward as a view, it would keep the other outputs alive
    dora: DoraNorms | None = None
    cached_input: Tensor | None = None
    cached_outputs: tuple[Tensor, ...] = ()
    num_fetched: int = 0

    @property
    def adapted_members(self) -> list[Any]:
        """The layers of the fused weight that have an adapter."""
        return [self.members[index] for index in self.shape.adapted]

    @property
    def first_adapted(self) -> Any:
        """The first layer with an adapter; all adapted layers have its hyperparameters."""
        return self.members[self.shape.adapted[0]]

    @property
    def in_features(self) -> int:
        """Input features, which all members share."""
        return int(self.members[0].in_features)

    @property
    def out_features(self) -> int:
        """Number of output features, summed over the layers of the fused weight."""
        return sum(self.shape.out_features)

    @property
    def dropout(self) -> float:
        """LoRA's dropout probability."""
        return get_dropout_rate(self.first_adapted)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matmuls."""
        return self.stored[-1].dtype

    def materialize(self) -> Tensor:
        """Return the dense fused weight. With an NF4 base it is a temporary tensor: release it soon."""
        return materialize(self.stored)

    def lora_views(self) -> tuple[Tensor, Tensor]:
        """Return the parts of the storage that hold s B [out, ranks] and A [ranks, in]."""
        if len(self.stored) > 1:
            scaled_b, lora_a = self.stored[-2:]
        else:
            scaled_b = self.stored[0][: self.out_features, self.in_features :]
            lora_a = self.stored[0][self.out_features :]
        return scaled_b, lora_a[:, : self.in_features]

    def lora_parameters(self) -> list[Tensor]:
        """Return the LoRA parameters of the adapted layers: every A, then every B."""
        lora_a = [member.lora_A[ADAPTER_NAME].weight for member in self.adapted_members]
        return lora_a + [member.lora_B[ADAPTER_NAME].weight for member in self.adapted_members]

    def dora_scale(self) -> Tensor | None:
        """Return m / ||W + s B A|| per output, 1 for members without an adapter; None for LoRA."""
        if self.dora is None:
            return None
        magnitudes = list(self.dora.row_norms.split(list(self.shape.out_features)))
        for index in self.shape.adapted:
            magnitudes[index] = self.members[index].lora_magnitude_vector[ADAPTER_NAME].weight.float()
        return torch.cat(magnitudes) / self.dora.row_norms

    def list_copies(self) -> Iterator[LoraPart]:
        """Yield what every A and B is copied to."""
        fp8 = Fp8Weights(*self.stored) if is_fp8(self.stored) else None
        scaled_b, lora_a = self.lora_views()
        rows, rank = scaled_b.split(list(self.shape.out_features)), self.shape.rank
        for index in self.shape.adapted:
            member, ranks = self.members[index], slice(index * rank, (index + 1) * rank)
            lora_b = member.lora_B[ADAPTER_NAME].weight
            yield LoraPart(member.lora_A[ADAPTER_NAME].weight, lora_a[ranks], 1.0)
            yield LoraPart(lora_b, rows[index][:, ranks], self.shape.lora_scale)
            if fp8 is not None:
                grad_b, scales = (one.split(list(self.shape.out_features))[index] for one in (fp8.grad_B, fp8.scales))
                yield LoraPart(lora_b, grad_b[:, ranks], self.shape.lora_scale, scales)

    def clear_cache(self) -> None:
        """Drop the cached outputs, which would keep the activations of their forward pass alive."""
        self.cached_outputs, self.cached_input, self.num_fetched = (), None, 0


def update_row_norms(weights: FusedLoraWeights, dora: DoraNorms) -> None:
    """Recompute ||w + b A|| per row as sqrt(||w||^2 + 2 b.(A w) + b.(A A^T b)), without forming W + s B A.

    The B of a fused weight is block-diagonal, so every row uses the A of its own matrix.
    """
    weight, in_features, out_features = weights.materialize(), weights.in_features, weights.out_features
    base, lora_a = weight[:out_features, :in_features], weight[out_features:, :in_features]
    scaled_b = weight[:out_features, in_features:]
    if supports_triton(weight.device):
        from launcher.training.kernels.fused_lora_triton import compute_row_norms

        compute_row_norms(base, lora_a, scaled_b, dora.base_squares, dora.row_norms)
        return
    lora_a, scaled_b = lora_a.float(), scaled_b.float()
    inner = 2 * (base.float() @ lora_a.t()) + scaled_b @ (lora_a @ lora_a.t())
    torch.sqrt((dora.base_squares + (scaled_b * inner).sum(1)).clamp(min=1e-12), out=dora.row_norms)


def is_fusable(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether this is a LoRA or DoRA layer whose base is in `dtype` or in NF4."""
    lora: Any = module
    if type(module) is not LoraLinear and not is_lora_4bit(module):
        return False
    if not can_store(lora.base_layer, dtype) or lora.fan_in_fan_out:
        return False
    if lora.active_adapters != [ADAPTER_NAME] or lora.lora_B[ADAPTER_NAME].bias is not None:
        return False
    return (ADAPTER_NAME in lora.lora_magnitude_vector) == bool(lora.lora_variant)  # DoRA, or no variant at all


def can_store(base: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether this base layer's weight can be stored in a fused weight."""
    return base.weight.dtype == dtype if type(base) is nn.Linear else is_fusable_4bit(base, dtype)


def get_dropout_rate(module: Any) -> float:
    """Return the dropout probability of a LoRA layer."""
    return float(getattr(module.lora_dropout[ADAPTER_NAME], "p", 0.0))


def get_fusion_key(module: Any) -> tuple[object, ...]:
    """Return the properties, such as the rank, that must be equal for adapted layers to share a fused weight."""
    return (
        type(module.base_layer),
        module.in_features,
        module.r[ADAPTER_NAME],
        module.scaling[ADAPTER_NAME],
        get_dropout_rate(module),
        ADAPTER_NAME in module.lora_magnitude_vector,
    )


def build_fused_weights(
    members: list[Any], *, clones_last_output: bool = False, in_fp8: bool = False
) -> FusedLoraWeights:
    """Move the layers' base weights into one fused weight; `in_fp8` stores them in FP8 if the sizes of all allow it."""
    adapted = tuple(index for index, member in enumerate(members) if not isinstance(member, PlainLinear))
    first = members[adapted[0]]
    rank = int(first.r[ADAPTER_NAME])
    ranks = count_fused_ranks(rank, len(members))
    weights = FusedLoraWeights(
        members=members,
        stored=_store(members, ranks, in_fp8=in_fp8),
        shape=LoraBlockShape(
            tuple(member.out_features for member in members), adapted, first.scaling[ADAPTER_NAME], rank
        ),
        clones_last_output=clones_last_output,
    )
    if ADAPTER_NAME in first.lora_magnitude_vector:
        base_squares = weights.materialize()[: weights.out_features, : weights.in_features].float().square().sum(1)
        weights.dora = DoraNorms(row_norms=base_squares.sqrt(), base_squares=base_squares)
    return weights


def _store(members: list[Any], ranks: int, *, in_fp8: bool) -> StoredWeights:
    bases = [member.base_layer for member in members]
    if type(bases[0]) is not nn.Linear:
        return tuple(concat_4bit_weights(members, ranks))
    if not in_fp8 or not all(map(can_round, bases)):
        return _concat_dense_weights(members, ranks)
    dtype, (codes, scales) = bases[0].weight.dtype, round_linears(bases)
    scaled_b = torch.zeros(len(codes), ranks, dtype=dtype, device=codes.device)
    lora_a = scaled_b.new_zeros(ranks, codes.shape[1])
    return tuple(Fp8Weights(codes, scales, torch.zeros_like(scaled_b), scaled_b, lora_a))


def _concat_dense_weights(members: list[Any], ranks: int) -> StoredWeights:
    in_features, out_features = members[0].in_features, sum(member.out_features for member in members)
    weight, row = members[0].base_layer.weight, 0
    fused = torch.zeros(out_features + ranks, in_features + ranks, dtype=weight.dtype, device=weight.device)
    for member in members:
        view = fused[row : row + member.out_features, :in_features]
        view.copy_(member.base_layer.weight.detach())
        member.base_layer.weight.data = view
        row += member.out_features
    return (fused,)
