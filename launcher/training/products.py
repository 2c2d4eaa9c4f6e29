"""Products of adapted matrices: LoRA's share rides along in the base's own product, for all matrices of one input.

PEFT multiplies an input by a matrix W, by A, by B, and adds: each output is written and read several times, and
queries, keys and values each do so for the same input. Here the matrices that share an input lie in one block
(blocks.py), so that an output, and the gradient of an input, is one product that is a few columns wider.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from launcher.memory import SHARED_INPUTS
from launcher.training.blocks import ADAPTER, Bare, Block, Lengths, is_storable, is_taken, likeness, make_block, measure
from launcher.training.kernels import kernels_run_on
from launcher.training.packed import Stored, build
from launcher.training.scaling import normalise


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
        stored: Stored,
        sizes: tuple[int, ...],
        adapted: tuple[int, ...],
        scale: float,
        *trained: Tensor,
    ) -> tuple[Tensor, ...]:
        block, num_in, num_out = build(stored), x.shape[1], sum(sizes)
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
        ctx.save_for_backward(kept, narrow, *stored)
        ctx.sizes, ctx.adapted, ctx.scale, ctx.drops = sizes, adapted, scale, dropped is not None
        ctx.rank, ctx.dtypes = len(trained[0]), tuple(tensor.dtype for tensor in trained)
        return outputs.split(list(sizes), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, narrow, *stored = ctx.saved_tensors
        block, rank = build(tuple(stored), grads[0]), ctx.rank
        num_in, num_out, count = x.shape[1], sum(ctx.sizes), len(ctx.sizes)
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
        of_adapters = [*(downs[index] for index in ctx.adapted), *(ups[index] for index in ctx.adapted)]
        trained = (grad.to(dtype) for grad, dtype in zip(of_adapters, ctx.dtypes, strict=True))
        return (x_grad, dropped_grad, None, None, None, None, *trained)


class _Base(torch.autograd.Function):
    """x [tokens, in] -> x W': the adapter has no share in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Stored, num_out: int) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.num_in = x.shape[1]
        return x @ build(stored)[:num_out, : x.shape[1]].t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return grad @ build(ctx.saved_tensors, grad)[: grad.shape[1], : ctx.num_in], None, None


def multiply(block: Block, x: Tensor) -> tuple[Tensor, ...]:
    """One output for each matrix of the block."""
    flat = x.flatten(0, -2).to(block.dtype)
    dropped: Tensor | None = None
    if block.dropout and block.lead.training:
        dropped = block.lead.lora_dropout[ADAPTER](flat)
    with torch.autocast(x.device.type, enabled=False):
        if block.lengths is None:
            outputs = _multiply(block, flat, dropped)
        elif dropped is None:
            outputs = _normalised(block, _multiply(block, flat, None), block.lengths)
        else:
            outputs = _multiply_dropped(block, flat, dropped, block.lengths)
    if block.frees_last:
        outputs = (*outputs[:-1], outputs[-1].clone())
    biases = (member.base_layer.bias for member in block.members)
    return tuple(out if bias is None else out + bias for out, bias in zip(outputs, biases, strict=True))


def _multiply(block: Block, x: Tensor, dropped: Tensor | None) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = _Products.apply(
        x, dropped, block.stored, block.sizes, block.adapted, block.scale, *block.adapters()
    )
    return outputs


def _normalised(
    block: Block, outputs: tuple[Tensor, ...], lengths: Lengths, rests: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """Adapted ones alone: a bare matrix multiplies by itself, and nobody takes what the block has of it."""
    of_members, scaled = lengths.of_rows.split(list(block.sizes)), list(outputs)
    for index in block.adapted:
        rest = None if rests is None else rests[index]
        scaled[index] = normalise(outputs[index], block.members[index], of_members[index], rest)
    return tuple(scaled)


def _multiply_dropped(block: Block, x: Tensor, dropped: Tensor, lengths: Lengths) -> tuple[Tensor, ...]:
    """DoRA's dropout acts on what the base does, too. PEFT: Wx + (c - 1)Wd + c sBAd, where d is x behind dropout,
    and c what rows are scaled by. That is W(x - d) + c(W + sBA)d: two products, whose inputs add up to x."""
    rests = _Base.apply(x - dropped, block.stored, block.num_out).split(list(block.sizes), dim=1)
    return _normalised(block, _multiply(block, dropped, None), lengths, rests)


class ProductLinear(nn.Module):
    """Comes before PEFT's class in the order of inheritance. A class, not a changed method: one compiled graph then
    serves all layers."""

    launcher_block: Block
    launcher_index: int

    def forward(self, x: Tensor, *arguments: Any, **more: Any) -> Tensor:
        adapted: Any = self
        if is_by_the_library() or adapted.disable_adapters or adapted.merged or arguments or more:
            result: Tensor = super().forward(x, *arguments, **more)
            return result
        block = self.launcher_block
        if block.given is not x:
            block.outputs, block.given, block.num_taken = multiply(block, x), x, 0
        output = block.outputs[self.launcher_index]
        block.num_taken += 1
        if block.num_taken == len(block.adapted):
            block.outputs, block.given, block.num_taken = (), None, 0
        return output.unflatten(0, x.shape[:-1])


@cache
def _taking(kind: Any) -> Any:
    return type(f"Product{kind.__name__}", (ProductLinear, kind), {})


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
        return [copy for block in self.blocks for copy in block.copies()]

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
                    measure(block, block.lengths)
        self._seen = versions

    def _fill(self, entries: list[tuple[Tensor, Tensor, float]]) -> None:
        from launcher.training.block_kernels import Filling

        if self._filling is None or self._filling.addresses != [source.data_ptr() for source, _, _ in entries]:
            self._filling = Filling(entries)
        self._filling()


def forget(products: Products) -> None:
    """What a pass that was broken off has left: it would keep all that the pass had kept."""
    for block in products.blocks:
        block.forget()


def give_back(products: Products) -> None:
    """Every matrix to PEFT: the base's weights stay in the blocks, which nothing else reads then."""
    for block in products.blocks:
        for member in block.trained:
            member.__class__ = type(member).__bases__[1]
            del member.launcher_block, member.launcher_index
    forget(products)
    products.blocks.clear()
    products.__dict__.pop("_copies", None)
    products._seen, products._filling = [], None


def lay_out_products(
    layers: list[nn.Module], dtype: torch.dtype, *, compiled: bool = False, filled: Collection[nn.Module] = ()
) -> Products:
    """Takes over every LoRA and DoRA matrix of the layers that it can; the others stay with PEFT.

    In parents that are to be `filled`, blocks take bare matrices in that share their input.
    """
    products = Products()
    for layer in layers:
        for parent in list(layer.modules()):
            members: dict[str, Any] = {name: child for name, child in parent.named_children() if is_taken(child, dtype)}
            for names in SHARED_INPUTS:  # others are blocks of their own
                alike = _find_alike(parent, names, members, dtype, fills=parent in filled)
                if len(alike) > 1:
                    # Values are kept as they are. Queries and keys are too where a norm follows, and is compiled.
                    frees_last = names[-1] == "v_proj" and not (compiled and hasattr(parent, "q_norm"))
                    products.blocks.append(_take(alike, frees_last=frees_last))
                    members = {name: member for name, member in members.items() if name not in names}
            products.blocks += [_take([member]) for member in members.values()]
    return products


def _find_alike(
    parent: Any, names: tuple[str, ...], taken: dict[str, Any], dtype: torch.dtype, *, fills: bool
) -> list[Any]:
    """Those of the names that can be one block."""
    adapted = [taken[name] for name in names if name in taken]
    if len({likeness(one) for one in adapted}) != 1:
        return []
    if not fills:
        return adapted
    kind = type(adapted[0].base_layer)
    others = [getattr(parent, name) for name in names if name not in taken]
    can_fill = all(type(one) is kind and is_storable(one, dtype) and not one.weight.requires_grad for one in others)
    return [taken.get(name) or Bare(getattr(parent, name)) for name in names] if can_fill else adapted


def _take(members: list[Any], *, frees_last: bool = False) -> Block:
    block = make_block(members, frees_last=frees_last)
    for index in block.adapted:
        member = members[index]
        member.__class__ = _taking(member.__class__)
        member.launcher_block, member.launcher_index = block, index
    return block
