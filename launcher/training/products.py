"""Products of adapted matrices: LoRA's share rides along in the base's own product, for all matrices of one input.

PEFT multiplies an input by a matrix W, by A, by B, and adds: each output is written and read several times, and
queries, keys and values each do so for the same input. Here the matrices that share an input lie in one block,

    [ W  sB ]   outputs      y  = [x, xA'] [W, sB]'
    [ A   0 ]   ranks        dx = [dy, dy sB] [W; A]

so that an output, and the gradient of an input, is one product that is a few columns wider. The base's weights live in
the block; what is trained is copied into it whenever it has changed. Parameters, their names and PEFT's files stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional

from launcher.memory import SHARED_INPUTS, count_block_ranks
from launcher.training.kernels import kernels_run_on

_ADAPTER = "default"


@torch.library.custom_op("launcher::product", mutates_args=())
def _product(left: Tensor, right: Tensor) -> Tensor:
    """Hidden from the compiler, which would make addmm of its sum with another: that copies the other first."""
    return left @ right


@_product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


class _Products(torch.autograd.Function):
    """x [tokens, in] -> one output for each matrix of a block. Gradients of A and B are returned, not of the block."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,  # x behind LoRA's dropout, where there is any
        block: Tensor,
        sizes: tuple[int, ...],
        scale: float,
        *trained: Tensor,
    ) -> tuple[Tensor, ...]:
        num_in, num_out = x.shape[1], sum(sizes)
        downs = block[num_out:, :num_in].t()
        if num_out >= 2 * num_in and dropped is None:
            # a wider input costs less than outputs that are written, read and written again
            wide = torch.cat((x, x @ downs), dim=1)
            kept, narrow = wide[:, :num_in], wide[:, num_in:]
            outputs = wide @ block[:num_out].t()
        else:
            kept = x if dropped is None else dropped
            narrow = kept @ downs
            outputs = x @ block[:num_out, :num_in].t()
            ups = block[:num_out, num_in:].t()
            is_compiled = torch.compiler.is_compiling()
            outputs = outputs + _product(narrow, ups) if is_compiled else torch.addmm(outputs, narrow, ups)
        ctx.save_for_backward(kept, narrow, block)
        ctx.sizes, ctx.scale, ctx.drops = sizes, scale, dropped is not None
        ctx.rank, ctx.dtypes = len(trained[0]), tuple(tensor.dtype for tensor in trained)
        return outputs.split(list(sizes), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, narrow, block = ctx.saved_tensors
        num_in, num_out, count = x.shape[1], sum(ctx.sizes), len(ctx.sizes)
        rank = ctx.rank
        narrows, ups, row = [], [], 0
        for index, grad in enumerate(grads):
            ranks = slice(index * rank, (index + 1) * rank)
            rows = slice(row, row + grad.shape[1])
            narrows.append(grad @ block[rows, num_in:][:, ranks])
            ups.append((grad.t() @ narrow[:, ranks]) * ctx.scale)
            row += grad.shape[1]
        room = narrow.shape[1] - rank * count
        filler = [grads[0].new_zeros(len(x), room)] if room else []
        wide = torch.cat((*grads, *narrows, *filler), dim=1)
        x_grad: Tensor | None = None
        dropped_grad: Tensor | None = None
        if ctx.drops:
            x_grad = wide[:, :num_out] @ block[:num_out, :num_in]
            dropped_grad = wide[:, num_out:] @ block[num_out:, :num_in]
        elif ctx.needs_input_grad[0]:
            x_grad = wide @ block[:, :num_in]
        downs = (wide[:, num_out : num_out + rank * count].t() @ x).split(rank, dim=0)
        trained = (grad.to(dtype) for grad, dtype in zip((*downs, *ups), ctx.dtypes, strict=True))
        return (x_grad, dropped_grad, None, None, None, *trained)


@dataclass(eq=False)
class Lengths:
    """DoRA: of each row of W + sBA, in fp32."""

    of_rows: Tensor
    squares: Tensor  # of the rows of W alone


@dataclass(eq=False)
class Block:
    """Matrices of one input. `given` and `outputs` hold until each of them has taken its own, in whatever order."""

    members: list[Any]
    matrix: Tensor
    sizes: tuple[int, ...]
    scale: float
    frees_last: bool  # the last output is copied: kept for the backward pass, it would keep all others with it
    lengths: Lengths | None  # DoRA's
    given: Tensor | None = None
    outputs: tuple[Tensor, ...] = ()
    num_taken: int = 0

    @property
    def rank(self) -> int:
        return int(self.members[0].r[_ADAPTER])

    @property
    def dropout(self) -> float:
        return _dropout_rate(self.members[0])

    def adapters(self) -> list[Tensor]:
        """Each A, then each B."""
        downs = [member.lora_A[_ADAPTER].weight for member in self.members]
        return downs + [member.lora_B[_ADAPTER].weight for member in self.members]

    def scales(self) -> Tensor | None:
        """DoRA: what each output is multiplied by."""
        if self.lengths is None:
            return None
        trained = [member.lora_magnitude_vector[_ADAPTER].weight for member in self.members]
        return torch.cat(trained).float() / self.lengths.of_rows

    def multiply(self, x: Tensor) -> tuple[Tensor, ...]:
        flat = x.flatten(0, -2).to(self.matrix.dtype)
        dropped: Tensor | None = None
        if self.dropout and self.members[0].training:
            dropped = self.members[0].lora_dropout[_ADAPTER](flat)
        with torch.autocast(x.device.type, enabled=False):
            if self.lengths is None:
                outputs = self._multiply(flat, dropped)
            elif dropped is None:
                outputs = self._normalised(self._multiply(flat, None), self.lengths)
            else:
                outputs = self._multiply_dropped(flat, dropped, self.lengths)
        if self.frees_last:
            outputs = (*outputs[:-1], outputs[-1].clone())
        biases = (member.base_layer.bias for member in self.members)
        return tuple(out if bias is None else out + bias for out, bias in zip(outputs, biases, strict=True))

    def _multiply(self, x: Tensor, dropped: Tensor | None) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _Products.apply(x, dropped, self.matrix, self.sizes, self.scale, *self.adapters())
        return outputs

    def _normalised(self, outputs: tuple[Tensor, ...], lengths: Lengths) -> tuple[Tensor, ...]:
        return tuple(map(normalise, outputs, self.members, lengths.of_rows.split(list(self.sizes))))

    def _multiply_dropped(self, x: Tensor, dropped: Tensor, lengths: Lengths) -> tuple[Tensor, ...]:
        """DoRA's dropout acts on what the base does, too. PEFT: Wx + (c - 1)Wd + c sBAd, where d is x behind dropout,
        and c what rows are scaled by. That is W(x - d) + c(W + sBA)d: two products, whose inputs add up to x."""
        base = self.matrix[: sum(self.sizes), : x.shape[1]]
        rest = functional.linear(x - dropped, base).split(list(self.sizes), dim=1)
        scaled = self._normalised(self._multiply(dropped, None), lengths)
        return tuple(one + other for one, other in zip(scaled, rest, strict=True))


def normalise(output: Tensor, member: Any, lengths: Tensor) -> Tensor:
    """DoRA: a trained length for each row, whatever W + sBA has; its norm is taken for a constant, as in the paper."""
    magnitude: Tensor = member.lora_magnitude_vector[_ADAPTER].weight
    return (output * (magnitude / lengths)).to(output.dtype)


class ProductLinear(LoraLinear):
    """PEFT's layer with another way to multiply. A class, not a changed method: one graph then serves all layers."""

    launcher_block: Block
    launcher_index: int

    def forward(self, x: Tensor, *arguments: Any, **more: Any) -> Tensor:
        if is_by_the_library() or self.disable_adapters or self.merged or arguments or more:
            result: Tensor = super().forward(x, *arguments, **more)
            return result
        block = self.launcher_block
        if block.given is not x:
            block.outputs, block.given, block.num_taken = block.multiply(x), x, 0
        output = block.outputs[self.launcher_index]
        block.num_taken += 1
        if block.num_taken == len(block.members):
            block.outputs, block.given, block.num_taken = (), None, 0
        return output.unflatten(0, x.shape[:-1])


class _Switch:
    is_off = False


def is_by_the_library() -> bool:
    return _Switch.is_off


@contextmanager
def by_the_library() -> Iterator[None]:
    """PEFT's own way, as the reference of ours."""
    was_off, _Switch.is_off = _Switch.is_off, True
    try:
        yield
    finally:
        _Switch.is_off = was_off


@dataclass(eq=False)
class Products:
    """All blocks of a model."""

    blocks: list[Block] = field(default_factory=list)
    _seen: list[int] = field(default_factory=list)
    _filling: Any = None  # of all blocks at once, where the device can

    @cached_property
    def _copies(self) -> list[tuple[Tensor, Tensor, float]]:
        return [copy for block in self.blocks for copy in _list_copies(block)]

    def refresh(self, *, anyway: bool = False) -> None:
        """Copies what is trained into the blocks, if it has changed since."""
        entries = self._copies
        versions = [source._version for source, _, _ in entries]
        if versions == self._seen and not anyway:
            return
        device = entries[0][0].device if entries else torch.device("cpu")
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            if kernels_run_on(device) and len({source.dtype for source, _, _ in entries}) == 1:
                self._fill(entries)
            else:
                for source, place, scale in entries:
                    place.copy_(source * scale)
            for block in self.blocks:
                if block.lengths is not None:
                    _measure(block, block.lengths)
        self._seen = versions

    def _fill(self, entries: list[tuple[Tensor, Tensor, float]]) -> None:
        from launcher.training.block_kernels import Filling

        if self._filling is None or self._filling.addresses != [source.data_ptr() for source, _, _ in entries]:
            self._filling = Filling(entries)
        self._filling()


def forget(products: Products) -> None:
    """What a pass that was broken off has left: it would keep all that the pass had kept."""
    for block in products.blocks:
        block.outputs, block.given, block.num_taken = (), None, 0


def give_back(products: Products) -> None:
    """Every matrix to PEFT: the base's weights stay in the blocks, which nothing else reads then."""
    for block in products.blocks:
        for member in block.members:
            member.__class__ = LoraLinear
            del member.launcher_block, member.launcher_index
    forget(products)
    products.blocks.clear()
    products.__dict__.pop("_copies", None)
    products._seen, products._filling = [], None


def _list_copies(block: Block) -> Iterator[tuple[Tensor, Tensor, float]]:
    """What is trained, where it goes, and what it is multiplied by."""
    num_out, row = sum(block.sizes), 0
    num_in = block.members[0].in_features
    for index, (member, size) in enumerate(zip(block.members, block.sizes, strict=True)):
        down, up = member.lora_A[_ADAPTER].weight, member.lora_B[_ADAPTER].weight
        rank = len(down)
        ranks = slice(index * rank, (index + 1) * rank)
        yield down, block.matrix[num_out:, :num_in][ranks], 1.0
        yield up, block.matrix[row : row + size, num_in:][:, ranks], block.scale
        row += size


def _measure(block: Block, lengths: Lengths) -> None:
    """Of each row w + bA, as |w|^2 + 2 b.(Aw) + b.(AA'b): the sum itself, as large as the base, is never made.

    Rows of other matrices have zeros in b where A is not theirs.
    """
    num_out, num_in = sum(block.sizes), block.members[0].in_features
    downs, ups = block.matrix[num_out:, :num_in], block.matrix[:num_out, num_in:]
    if kernels_run_on(block.matrix.device):
        from launcher.training.block_kernels import measure

        measure(block.matrix[:num_out, :num_in], downs, ups, lengths.squares, lengths.of_rows)
        return
    downs, ups = downs.float(), ups.float()
    along = 2 * (block.matrix[:num_out, :num_in].float() @ downs.t()) + ups @ (downs @ downs.t())
    torch.sqrt((lengths.squares + (ups * along).sum(1)).clamp(min=1e-12), out=lengths.of_rows)


def lay_out_products(layers: list[nn.Module], dtype: torch.dtype, *, compiled: bool = False) -> Products:
    """Takes over every LoRA and DoRA matrix of the layers that it can; the others stay with PEFT."""
    products = Products()
    for layer in layers:
        for parent in list(layer.modules()):
            children = {name: child for name, child in parent.named_children() if _is_taken(child, dtype)}
            for names in SHARED_INPUTS:  # others are blocks of their own
                alike = [children[name] for name in names if name in children]
                if len(alike) > 1 and len({_likeness(child) for child in alike}) == 1:
                    # Values are kept as they are. Queries and keys are too where a norm follows, and is compiled.
                    frees_last = names[-1] == "v_proj" and not (compiled and hasattr(parent, "q_norm"))
                    products.blocks.append(_make_block(alike, frees_last=frees_last))
                    children = {name: child for name, child in children.items() if name not in names}
            products.blocks += [_make_block([child]) for child in children.values()]
    return products


def _is_taken(module: nn.Module, dtype: torch.dtype) -> bool:
    """Plain linears in the dtype of computing."""
    if type(module) is not LoraLinear or type(module.base_layer) is not nn.Linear:
        return False
    if module.active_adapters != [_ADAPTER] or module.base_layer.weight.dtype != dtype or module.fan_in_fan_out:
        return False
    if module.lora_B[_ADAPTER].bias is not None:
        return False
    is_dora = _ADAPTER in module.lora_magnitude_vector
    return is_dora == bool(module.lora_variant)


def _dropout_rate(module: Any) -> float:
    return float(getattr(module.lora_dropout[_ADAPTER], "p", 0.0))


def _likeness(module: Any) -> tuple[object, ...]:
    return (
        module.in_features,
        module.r[_ADAPTER],
        module.scaling[_ADAPTER],
        _dropout_rate(module),
        _ADAPTER in module.lora_magnitude_vector,
    )


def _make_block(members: list[Any], *, frees_last: bool = False) -> Block:
    """The base's weights move into it."""
    sizes = tuple(member.out_features for member in members)
    num_in, num_out = members[0].in_features, sum(sizes)
    ranks = count_block_ranks(members[0].r[_ADAPTER], len(members))
    weight = members[0].base_layer.weight
    matrix = torch.zeros(num_out + ranks, num_in + ranks, dtype=weight.dtype, device=weight.device)
    block = Block(
        members=members,
        matrix=matrix,
        sizes=sizes,
        scale=members[0].scaling[_ADAPTER],
        frees_last=frees_last,
        lengths=None,
    )
    row = 0
    for index, (member, size) in enumerate(zip(members, sizes, strict=True)):
        place = matrix[row : row + size, :num_in]
        place.copy_(member.base_layer.weight.detach())
        member.base_layer.weight.data = place
        member.__class__ = ProductLinear
        member.launcher_block, member.launcher_index = block, index
        row += size
    if _ADAPTER in members[0].lora_magnitude_vector:
        squares = matrix[:num_out, :num_in].float().square().sum(1)
        block.lengths = Lengths(of_rows=squares.sqrt(), squares=squares)
    return block
