"""Adapted matrices of one input, laid out as one block: products.py multiplies by it.

    [ W  sB ]   outputs      y  = [x, xA'] [W, sB]'
    [ A   0 ]   ranks        dx = [dy, dy sB] [W; A]

The base's weights live in the block, or beside it in four bits each (packed.py); what is trained is copied into it
whenever it has changed. Parameters, their names and PEFT's files stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from launcher.memory import count_block_ranks
from launcher.training.kernels import kernels_run_on
from launcher.training.packed import Stored, build, is_adapted_and_packed, is_packed, pack

ADAPTER = "default"


@dataclass(eq=False)
class Lengths:
    """DoRA: of each row of W + sBA, in fp32."""

    of_rows: Tensor
    squares: Tensor  # of the rows of W alone


@dataclass(eq=False)
class Bare:
    """A matrix without an adapter, in a block with adapted ones: what is the adapter's there is zero for it."""

    base_layer: Any

    @property
    def in_features(self) -> int:
        return int(self.base_layer.in_features)

    @property
    def out_features(self) -> int:
        return int(self.base_layer.out_features)


@dataclass(eq=False)
class Block:
    """`given` and `outputs` hold until each adapted matrix has taken its own, in whatever order."""

    members: list[Any]  # PEFT's layers; or bare
    adapted: tuple[int, ...]  # which of them are
    stored: Stored
    sizes: tuple[int, ...]
    scale: float
    frees_last: bool  # the last output is copied: kept for the backward pass, it would keep all others with it
    lengths: Lengths | None  # DoRA's
    given: Tensor | None = None
    outputs: tuple[Tensor, ...] = ()
    num_taken: int = 0

    @property
    def trained(self) -> list[Any]:
        return [self.members[index] for index in self.adapted]

    @property
    def lead(self) -> Any:
        """All adapted ones are alike."""
        return self.members[self.adapted[0]]

    @property
    def num_in(self) -> int:
        return int(self.members[0].in_features)

    @property
    def num_out(self) -> int:
        return sum(self.sizes)

    @property
    def rank(self) -> int:
        return int(self.lead.r[ADAPTER])

    @property
    def dropout(self) -> float:
        return dropout_rate(self.lead)

    @property
    def dtype(self) -> torch.dtype:
        return self.stored[-1].dtype

    def matrix(self) -> Tensor:
        """Where the base is packed, one of its own, that is to be let go soon."""
        return build(self.stored)

    def borders(self) -> tuple[Tensor, Tensor]:
        """Where sB of all matrices goes, and where A."""
        if len(self.stored) > 1:
            right, below = self.stored[-2:]
        else:
            right, below = self.stored[0][: self.num_out, self.num_in :], self.stored[0][self.num_out :]
        return right, below[:, : self.num_in]

    def adapters(self) -> list[Tensor]:
        """Each A, then each B."""
        downs = [member.lora_A[ADAPTER].weight for member in self.trained]
        return downs + [member.lora_B[ADAPTER].weight for member in self.trained]

    def scales(self) -> Tensor | None:
        """DoRA: what each output is multiplied by; a bare matrix's by one."""
        if self.lengths is None:
            return None
        wanted = list(self.lengths.of_rows.split(list(self.sizes)))
        for index in self.adapted:
            wanted[index] = self.members[index].lora_magnitude_vector[ADAPTER].weight.float()
        return torch.cat(wanted) / self.lengths.of_rows

    def copies(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """What is trained, where it goes, and what it is multiplied by."""
        right, below = self.borders()
        rows = right.split(list(self.sizes))
        for index in self.adapted:
            member, ranks = self.members[index], slice(index * self.rank, (index + 1) * self.rank)
            yield member.lora_A[ADAPTER].weight, below[ranks], 1.0
            yield member.lora_B[ADAPTER].weight, rows[index][:, ranks], self.scale

    def forget(self) -> None:
        self.outputs, self.given, self.num_taken = (), None, 0


def measure(block: Block, lengths: Lengths) -> None:
    """Of each row w + bA, as |w|^2 + 2 b.(Aw) + b.(AA'b): the sum itself, as large as the base, is never made.

    Rows of other matrices have zeros in b where A is not theirs.
    """
    matrix, num_in, num_out = block.matrix(), block.num_in, block.num_out
    downs, ups = matrix[num_out:, :num_in], matrix[:num_out, num_in:]
    if kernels_run_on(matrix.device):
        from launcher.training.block_kernels import measure as measure_by_kernels

        measure_by_kernels(matrix[:num_out, :num_in], downs, ups, lengths.squares, lengths.of_rows)
        return
    downs, ups = downs.float(), ups.float()
    along = 2 * (matrix[:num_out, :num_in].float() @ downs.t()) + ups @ (downs @ downs.t())
    torch.sqrt((lengths.squares + (ups * along).sum(1)).clamp(min=1e-12), out=lengths.of_rows)


def is_taken(module: nn.Module, dtype: torch.dtype) -> bool:
    """Adapted, its base in the dtype of computing or of four bits."""
    adapted: Any = module
    if type(module) is not LoraLinear and not is_adapted_and_packed(module):
        return False
    if not is_storable(adapted.base_layer, dtype) or adapted.fan_in_fan_out:
        return False
    if adapted.active_adapters != [ADAPTER] or adapted.lora_B[ADAPTER].bias is not None:
        return False
    is_dora = ADAPTER in adapted.lora_magnitude_vector
    return is_dora == bool(adapted.lora_variant)


def is_storable(base: nn.Module, dtype: torch.dtype) -> bool:
    """In a block."""
    return base.weight.dtype == dtype if type(base) is nn.Linear else is_packed(base, dtype)


def dropout_rate(module: Any) -> float:
    return float(getattr(module.lora_dropout[ADAPTER], "p", 0.0))


def likeness(module: Any) -> tuple[object, ...]:
    """Adapted matrices that can be in one block are alike in this."""
    return (
        type(module.base_layer),
        module.in_features,
        module.r[ADAPTER],
        module.scaling[ADAPTER],
        dropout_rate(module),
        ADAPTER in module.lora_magnitude_vector,
    )


def make_block(members: list[Any], *, frees_last: bool = False) -> Block:
    """The base's weights move into it."""
    adapted = tuple(index for index, member in enumerate(members) if not isinstance(member, Bare))
    lead = members[adapted[0]]
    ranks = count_block_ranks(lead.r[ADAPTER], len(members))
    block = Block(
        members=members,
        adapted=adapted,
        stored=_move(members, ranks) if type(lead.base_layer) is nn.Linear else pack(members, ranks),
        sizes=tuple(member.out_features for member in members),
        scale=lead.scaling[ADAPTER],
        frees_last=frees_last,
        lengths=None,
    )
    if ADAPTER in lead.lora_magnitude_vector:
        squares = block.matrix()[: block.num_out, : block.num_in].float().square().sum(1)
        block.lengths = Lengths(of_rows=squares.sqrt(), squares=squares)
    return block


def _move(members: list[Any], ranks: int) -> Stored:
    num_in, num_out = members[0].in_features, sum(member.out_features for member in members)
    weight, row = members[0].base_layer.weight, 0
    matrix = torch.zeros(num_out + ranks, num_in + ranks, dtype=weight.dtype, device=weight.device)
    for member in members:
        place = matrix[row : row + member.out_features, :num_in]
        place.copy_(member.base_layer.weight.detach())
        member.base_layer.weight.data = place
        row += member.out_features
    return (matrix,)
