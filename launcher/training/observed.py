"""What is really active, looked up in the live process: nothing in here is taken from the plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.training.batches import PackedBatch
from launcher.training.layers import find_checkpointing, is_compiled, uncompiled
from launcher.training.model import TrainedModel
from launcher.training.optim import innermost
from launcher.training.proof import Proof
from launcher.training.run import Run
from launcher.units import format_count


def observe(run: Run, proof: Proof | None, operations: Operations, compiled: str) -> dict[str, str]:
    """Name -> what was seen, in the order that a banner shows."""
    engine = run.engine
    seen = {
        "device": _device(engine.device),
        "model": _model(engine.module),
        "precision": _precision(engine.module, operations),
        "attention": _attention(engine.module, proof, operations.attention),
        "loss": f"{engine.module.loss_kernel} cross-entropy of the trained positions",
        "optimizer": _optimizer(engine.optimizer),
        "checkpointing": _checkpointing(engine.module),
        "torch.compile": compiled or _compiling(engine.module),
    }
    if proof is not None and proof.products is not None:
        blocks = len(engine.module.products.blocks)
        seen["products"] = (
            f"adapters inside the base's own, {blocks} blocks = PEFT's (gradients differ by {proof.products:.0e})"
        )
    if engine.adds_up_behind:
        seen["gradients"] = f"of {engine.num_ranks} replicas, added up behind each step"
    if engine.graphs is not None:
        seen["CUDA graph"] = "of a micro-step" if engine.graphs.is_active else "failed, kernels are launched one by one"
    if engine.device.type == "cuda":
        seen["TF32"] = "on" if torch.backends.cuda.matmul.allow_tf32 else "off"
    return seen


def count_graphs() -> tuple[int, int]:
    """That torch.compile has made in this process, and where it had to leave them."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """That a forward pass really ends in."""

    attention: tuple[str, ...]
    products: tuple[str, ...]  # dtypes of matrix products


def observe_operations(model: nn.Module, batch: PackedBatch) -> Operations:
    recorder = _Recorder()
    with torch.no_grad(), uncompiled(), recorder:
        model(batch)
    named = {name for name in recorder.names if any(word in name for word in ("attn", "attention", "flash"))}
    named = named or {name for name in recorder.names if "softmax" in name}
    return Operations(attention=tuple(sorted(named)), products=tuple(sorted(recorder.dtypes)))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        name = str(function).rpartition(".")[0]
        self.names.add(name)
        if name in ("aten.mm", "aten.addmm", "aten.bmm"):
            self.dtypes.add(str(arguments[-1].dtype).removeprefix("torch."))
        return function(*arguments, **(more or {}))


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def _model(module: TrainedModel) -> str:
    trained = sum(_count(p) for p in module.parameters() if p.requires_grad)
    frozen = sum(_count(p) for p in module.parameters() if not p.requires_grad)
    kind = type(module.base).__name__
    if not isinstance(module.model, PeftModel):
        return f"{kind}, all {format_count(trained)} parameters are trained"
    config: Any = module.model.peft_config["default"]
    adapter = "DoRA" if getattr(config, "use_dora", False) else str(config.peft_type.value)
    return f"{kind}, {adapter}: {format_count(trained)} trained, {format_count(frozen)} stored frozen"


def _count(parameter: Any) -> int:
    """ZeRO-3 leaves an empty tensor where a parameter was."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _precision(module: TrainedModel, operations: Operations) -> str:
    trained = _main_dtype(p for p in module.parameters() if p.requires_grad)
    frozen = _main_dtype(p for p in module.parameters() if not p.requires_grad)
    products = f"products in {', '.join(operations.products)}"
    return f"{products}, trained weights {trained}" + (f", frozen {frozen}" if frozen else "")


def _main_dtype(parameters: Any) -> str:
    counts: Counter[str] = Counter()
    for parameter in parameters:
        quantized = type(parameter).__name__ if type(parameter) is not nn.Parameter else ""
        dtype = str(parameter.dtype).removeprefix("torch.")
        counts[f"{dtype} ({quantized})" if quantized in ("Params4bit", "Int8Params") else dtype] += _count(parameter)
    return counts.most_common(1)[0][0] if counts else ""


def _attention(module: TrainedModel, proof: Proof | None, operations: tuple[str, ...]) -> str:
    name = str(module.base.config._attn_implementation).removeprefix("launcher_").lower()
    shown = f"{name} ({', '.join(operations)})" if operations else name
    if proof is None:
        return shown
    return f"{shown}; {proof.num_documents} packed documents = each alone (loss differs by {proof.loss:.0e})"


def _optimizer(optimizer: Any) -> str:
    inner = innermost(optimizer)
    fused = inner.param_groups[0].get("fused")
    name = f"{type(inner).__module__.split('.')[0]} {type(inner).__name__}"
    return f"{name}{', fused' if fused else ''}"


def _checkpointing(module: TrainedModel) -> str:
    forwards = [find_checkpointing(layer) for layer in module.layers]
    kinds = sorted({kind for kind in forwards if kind})
    return f"{', '.join(kinds)}, {sum(1 for kind in forwards if kind)} layers" if kinds else "off"


def _compiling(module: TrainedModel) -> str:
    """What is compiled later, in the first step: DeepSpeed leaves no pass before it."""
    decoder: Any = module.base.get_decoder()
    if is_compiled(decoder):
        return "the whole decoder, in the first step"
    return "each layer, in the first step" if any(is_compiled(layer) for layer in module.layers) else "off"
