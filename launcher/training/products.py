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
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional

_ADAPTER = "default"
# Matrices that get the same input, by the names of Llama and its relatives. Others are blocks of their own.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.library.custom_op("launcher::fill_narrow", mutates_args=("wide",))
def _fill_narrow(wide: Tensor, matrix: Tensor, sizes: list[int]) -> None:
    """wide = [parts, narrow]: each part times its piece of a matrix [parts, ranks] goes into its columns of `narrow`.

    In place, so that a part is written once, by whoever computes it, into the wide tensor that the next product reads.
    """
    total = sum(sizes)
    rank = (wide.shape[1] - total) // len(sizes)
    row = 0
    for index, size in enumerate(sizes):
        column = total + index * rank
        piece = matrix[row : row + size, index * rank : (index + 1) * rank]
        torch.mm(wide[:, row : row + size], piece, out=wide[:, column : column + rank])
        row += size


@_fill_narrow.register_fake
def _(*_arguments: Any) -> None:
    return None


@torch.library.custom_op("launcher::product", mutates_args=())
def _product(left: Tensor, right: Tensor) -> Tensor:
    """Hidden from the compiler, which would make addmm of its sum with another: that copies the other first."""
    return left @ right


@_product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def _widen(parts: list[Tensor], matrix: Tensor, num_ranks: int) -> Tensor:
    wide = torch.cat([*parts, parts[0].new_zeros(len(parts[0]), num_ranks)], dim=1)
    _fill_narrow(wide, matrix, [part.shape[1] for part in parts])
    return wide


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
            wide = _widen([x], downs, block.shape[1] - num_in)
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
        ctx.dtypes = tuple(tensor.dtype for tensor in trained)
        return outputs.split(list(sizes), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, narrow, block = ctx.saved_tensors
        num_in, num_out, count = x.shape[1], sum(ctx.sizes), len(ctx.sizes)
        rank = narrow.shape[1] // count
        wide = _widen(list(grads), block[:num_out, num_in:], narrow.shape[1])
        ups, row = [], 0
        for index, size in enumerate(ctx.sizes):
            ranks = slice(index * rank, (index + 1) * rank)
            ups.append((wide[:, row : row + size].t() @ narrow[:, ranks]) * ctx.scale)
            row += size
        x_grad: Tensor | None = None
        dropped_grad: Tensor | None = None
        if ctx.drops:
            x_grad = wide[:, :num_out] @ block[:num_out, :num_in]
            dropped_grad = wide[:, num_out:] @ block[num_out:, :num_in]
        elif ctx.needs_input_grad[0]:
            x_grad = wide @ block[:, :num_in]
        downs = (wide[:, num_out:].t() @ x).split(rank, dim=0)
        trained = (grad.to(dtype) for grad, dtype in zip((*downs, *ups), ctx.dtypes, strict=True))
        return (x_grad, dropped_grad, None, None, None, *trained)


@dataclass(eq=False)
class _Block:
    """Matrices of one input. `given` and `outputs` hold until each of them has taken its own, in whatever order."""

    members: list[Any]
    matrix: Tensor
    sizes: tuple[int, ...]
    scale: float
    frees_last: bool  # the last output is copied: kept for the backward pass, it would keep all others with it
    norms: tuple[Tensor, ...]  # DoRA: of each row of W + sBA, for each matrix; none otherwise
    given: Tensor | None = None
    outputs: tuple[Tensor, ...] = ()
    num_taken: int = 0

    def multiply(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.members[0]
        flat = x.flatten(0, -2).to(self.matrix.dtype)
        rate = _dropout_rate(first) if first.training else 0.0
        dropped = functional.dropout(flat, rate) if rate else None
        downs = [member.lora_A[_ADAPTER].weight for member in self.members]
        ups = [member.lora_B[_ADAPTER].weight for member in self.members]
        with torch.autocast(x.device.type, enabled=False):
            outputs: tuple[Tensor, ...] = _Products.apply(
                flat, dropped, self.matrix, self.sizes, self.scale, *downs, *ups
            )
            if self.norms:
                outputs = tuple(map(_normalise, outputs, self.members, self.norms))
        if self.frees_last:
            outputs = (*outputs[:-1], outputs[-1].clone())
        biases = (member.base_layer.bias for member in self.members)
        return tuple(out if bias is None else out + bias for out, bias in zip(outputs, biases, strict=True))


def _normalise(output: Tensor, member: Any, norm: Tensor) -> Tensor:
    """DoRA: a trained length for each row, whatever W + sBA has; its norm is taken for a constant, as in the paper."""
    magnitude: Tensor = member.lora_magnitude_vector[_ADAPTER].weight
    return (output * (magnitude / norm)).to(output.dtype)


class ProductLinear(LoraLinear):
    """PEFT's layer with another way to multiply. A class, not a changed method: one graph then serves all layers."""

    launcher_block: _Block
    launcher_index: int

    def forward(self, x: Tensor, *arguments: Any, **more: Any) -> Tensor:
        if _Switch.is_off or self.disable_adapters or self.merged or arguments or more:
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

    blocks: list[_Block] = field(default_factory=list)
    _seen: list[int] = field(default_factory=list)

    def refresh(self, *, anyway: bool = False) -> None:
        """Copies what is trained into the blocks, if it has changed since."""
        trained = [parameter for block in self.blocks for parameter in _trained(block)]
        versions = [parameter._version for parameter in trained]
        if versions == self._seen and not anyway:
            return
        device = trained[0].device.type if trained else "cpu"
        with torch.no_grad(), torch.autocast(device, enabled=False):
            for block in self.blocks:
                _copy_in(block)
        self._seen = versions


def forget(products: Products) -> None:
    """What a pass that was broken off has left: it would keep all that the pass had kept."""
    for block in products.blocks:
        block.outputs, block.given, block.num_taken = (), None, 0


def _trained(block: _Block) -> Iterator[nn.Parameter]:
    for member in block.members:
        yield member.lora_A[_ADAPTER].weight
        yield member.lora_B[_ADAPTER].weight


def _copy_in(block: _Block) -> None:
    num_out, row = sum(block.sizes), 0
    num_in = block.members[0].in_features
    for index, (member, size) in enumerate(zip(block.members, block.sizes, strict=True)):
        down, up = member.lora_A[_ADAPTER].weight, member.lora_B[_ADAPTER].weight
        rank = len(down)
        ranks = slice(index * rank, (index + 1) * rank)
        block.matrix[num_out:, :num_in][ranks].copy_(down)
        block.matrix[row : row + size, num_in:][:, ranks].copy_(up * block.scale)
        if block.norms:
            wide = block.matrix[row : row + size, :num_in].float()
            weight = torch.addmm(wide, up.float(), down.float(), alpha=block.scale)
            torch.linalg.vector_norm(weight, dim=1, out=block.norms[index])
        row += size


def lay_out_products(layers: list[nn.Module], dtype: torch.dtype, *, compiled: bool = False) -> Products:
    """Takes over every LoRA and DoRA matrix of the layers that it can; the others stay with PEFT."""
    products = Products()
    for layer in layers:
        for parent in list(layer.modules()):
            children = {name: child for name, child in parent.named_children() if _is_taken(child, dtype)}
            for names in _TOGETHER:
                alike = [children[name] for name in names if name in children]
                if len(alike) > 1 and len({_likeness(child) for child in alike}) == 1:
                    # Values are kept as they are. Queries and keys are too where a norm follows, and is compiled.
                    frees_last = names[-1] == "v_proj" and not (compiled and hasattr(parent, "q_norm"))
                    products.blocks.append(_make_block(alike, frees_last=frees_last))
                    children = {name: child for name, child in children.items() if name not in names}
            products.blocks += [_make_block([child]) for child in children.values()]
    return products


def _is_taken(module: nn.Module, dtype: torch.dtype) -> bool:
    """Plain linears in the dtype of computing. DoRA's dropout acts on the base's product too: PEFT's way stays."""
    if type(module) is not LoraLinear or type(module.base_layer) is not nn.Linear:
        return False
    if module.active_adapters != [_ADAPTER] or module.base_layer.weight.dtype != dtype or module.fan_in_fan_out:
        return False
    if module.lora_B[_ADAPTER].bias is not None:
        return False
    is_dora = _ADAPTER in module.lora_magnitude_vector
    return not (is_dora and _dropout_rate(module)) and is_dora == bool(module.lora_variant)


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


def _make_block(members: list[Any], *, frees_last: bool = False) -> _Block:
    """The base's weights move into it."""
    sizes = tuple(member.out_features for member in members)
    num_in, num_out = members[0].in_features, sum(sizes)
    ranks = members[0].r[_ADAPTER] * len(members)
    weight = members[0].base_layer.weight
    matrix = torch.zeros(num_out + ranks, num_in + ranks, dtype=weight.dtype, device=weight.device)
    norms: tuple[Tensor, ...] = ()
    if _ADAPTER in members[0].lora_magnitude_vector:
        norms = tuple(torch.ones(size, dtype=torch.float32, device=weight.device) for size in sizes)
    block = _Block(
        members=members,
        matrix=matrix,
        sizes=sizes,
        scale=members[0].scaling[_ADAPTER],
        frees_last=frees_last,
        norms=norms,
    )
    row = 0
    for index, (member, size) in enumerate(zip(members, sizes, strict=True)):
        place = matrix[row : row + size, :num_in]
        place.copy_(member.base_layer.weight.detach())
        member.base_layer.weight.data = place
        member.__class__ = ProductLinear
        member.launcher_block, member.launcher_index = block, index
        row += size
    return block
