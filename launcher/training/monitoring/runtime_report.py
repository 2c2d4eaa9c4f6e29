"""Describe which features are active in the running process, read from the model and engine instead of the plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.core.units import format_count
from launcher.training.data.collate import PackedBatch
from launcher.training.engine.optimizer import unwrap_optimizer
from launcher.training.engine.run import TrainingRun
from launcher.training.model.compile_checkpoint import compile_disabled, get_checkpointing, is_compiled
from launcher.training.model.nf4_linear import Nf4Linear
from launcher.training.model.packed_lm import PackedCausalLM
from launcher.training.verify.packing import PackingCheck


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileResult:
    """What torch.compile did in the warm-up step."""

    description: str = ""  # empty: nothing is compiled, or not yet
    graphs: int | None = None  # None: nothing is compiled, or not yet
    has_failed: bool = False


def describe_runtime(run: TrainingRun, check: PackingCheck | None, ops: ForwardOps, compiled: str) -> dict[str, str]:
    """Return a description of each active feature, by name, in display order."""
    engine = run.engine
    report = {
        "device": _device(engine.device),
        "model": _model(engine.module),
        "precision": _precision(engine.module, ops),
        "attention": _attention(engine.module, check, ops.attention),
        "loss": f"{engine.module.loss_kernel} cross-entropy over the trained positions",
        "optimizer": _optimizer(engine.optimizer),
        "checkpointing": _checkpointing(engine.module),
        "torch.compile": compiled or _compiling(engine.module),
    }
    if check is not None and check.lora_grads is not None:
        blocks = len(engine.module.fused_lora.weights)
        report["LoRA"] = (
            f"LoRA fused into {blocks} base matmuls; equals PEFT (gradients differ by {check.lora_grads:.0e})"
        )
    if groups := len(engine.module.fp8_groups):
        difference = None if check is None else check.fp8_grads
        compared = "" if difference is None else f"; gradients differ from FP32 by {difference:.0e}"
        report["FP8"] = f"outputs and input gradients of {groups} matmuls{compared}"
    if engine.defer_gradient_sync:
        report["gradients"] = f"all-reduced over {engine.num_ranks} ranks after each step"
    if engine.graphs is not None:
        report["CUDA graph"] = "micro-step" if engine.graphs.is_active else "failed; kernels are launched one by one"
    if engine.device.type == "cuda":
        report["TF32"] = "on" if torch.backends.cuda.matmul.allow_tf32 else "off"
    return report


def collect_runtime_fields(run: TrainingRun, compilation: CompileResult) -> dict[str, object]:
    """Return fields of outcome.json for programs: attention backend, compiled graphs, and what failed."""
    graphs = run.engine.graphs
    return {
        "attention_backend": _attention_backend(run.engine.module),
        "has_compile_failed": compilation.has_failed,
        "has_cuda_graph_failed": graphs is not None and not graphs.is_active,
        "compiled_graphs": compilation.graphs,
        "recompiled_graphs": 0,
    }


def count_compiled_graphs() -> tuple[int, int]:
    """Return the number of graphs compiled in this process, and of graph breaks."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardOps:
    """Attention operations and matmul dtypes that a forward pass used."""

    attention: tuple[str, ...]
    matmul_dtypes: tuple[str, ...]


def record_forward_ops(model: nn.Module, batch: PackedBatch) -> ForwardOps:
    """Run a forward pass and record its attention operations and matmul dtypes."""
    recorder = _Recorder()
    with torch.no_grad(), compile_disabled(), recorder:
        model(batch)
    named = {name for name in recorder.names if any(word in name for word in ("attn", "attention", "flash"))}
    named = named or {name for name in recorder.names if "softmax" in name}
    return ForwardOps(attention=tuple(sorted(named)), matmul_dtypes=tuple(sorted(recorder.dtypes)))


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


def _model(module: PackedCausalLM) -> str:
    trained = sum(_count(p) for p in module.parameters() if p.requires_grad)
    frozen = sum(_count(p) for p in module.parameters() if not p.requires_grad)
    kind = type(module.base).__name__
    if not isinstance(module.model, PeftModel):
        return f"{kind}, full fine-tuning of {format_count(trained)} parameters"
    config: Any = module.model.peft_config["default"]
    adapter = "DoRA" if getattr(config, "use_dora", False) else str(config.peft_type.value).replace("LORA", "LoRA")
    return f"{kind}, {adapter}: {format_count(trained)} trained, {format_count(frozen)} frozen"


def _count(parameter: Any) -> int:
    """Return the number of elements of a parameter, also under ZeRO-3, where the local tensor is empty."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _precision(module: PackedCausalLM, ops: ForwardOps) -> str:
    trained, frozen = (_main_dtype(module, trained=trained) for trained in (True, False))
    matmuls = f"matmuls in {', '.join(ops.matmul_dtypes)}"
    return f"{matmuls}, trained weights {trained}" + (f", frozen {frozen}" if frozen else "")


def _main_dtype(module: nn.Module, *, trained: bool) -> str:
    """Return the dtype of most trained weights, or of most frozen ones if not `trained`; empty if there are none."""
    sharded_nf4 = {id(child.weight) for child in module.modules() if isinstance(child, Nf4Linear)}
    counts: Counter[str] = Counter()
    for parameter in module.parameters():
        if parameter.requires_grad != trained:
            continue
        if type(parameter).__name__ == "Params4bit" or id(parameter) in sharded_nf4:
            counts["NF4"] += 2 * parameter.element_size() * _count(parameter)  # two weights per byte
        else:
            counts[str(parameter.dtype).removeprefix("torch.")] += _count(parameter)
    return counts.most_common(1)[0][0] if counts else ""


def _attention(module: PackedCausalLM, check: PackingCheck | None, operations: tuple[str, ...]) -> str:
    name = _attention_backend(module)
    shown = f"{name} ({', '.join(operations)})" if operations else name
    if check is None:
        return shown
    return f"{shown}; {check.num_documents} packed documents equal unpacked ones (loss differs by {check.loss:.0e})"


def _attention_backend(module: PackedCausalLM) -> str:
    return str(module.base.config._attn_implementation).removeprefix("launcher_").lower()


def _optimizer(optimizer: Any) -> str:
    inner = unwrap_optimizer(optimizer)
    fused = inner.param_groups[0].get("fused")
    name = f"{type(inner).__module__.split('.')[0]} {type(inner).__name__}"
    return f"{name}{', fused' if fused else ''}"


def _checkpointing(module: PackedCausalLM) -> str:
    forwards = [get_checkpointing(layer) for layer in module.layers]
    kinds = sorted({kind for kind in forwards if kind})
    return f"{', '.join(kinds)}, {sum(1 for kind in forwards if kind)} layers" if kinds else "off"


def _compiling(module: PackedCausalLM) -> str:
    """Describe what will be compiled in the first step, because DeepSpeed has no warm-up step."""
    decoder: Any = module.base.get_decoder()
    if is_compiled(decoder):
        return "decoder, in the first step"
    return "per layer, in the first step" if any(is_compiled(layer) for layer in module.layers) else "off"
