"""Shared helpers of the training tests: a tiny base model, packs of random tokens, and runs built from them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from launcher.core import metrics
from launcher.core.metrics import StepMetrics
from launcher.core.run_paths import RunPaths
from launcher.corpus.bin_packing import Packing
from launcher.corpus.pack_file import Pack, write_packs
from launcher.corpus.store import Store, publish
from launcher.corpus.token_spool import TokenSpool
from launcher.corpus.tokenize_rows import TokenBatch
from launcher.plan.estimate.memory.recipe import Recipe
from launcher.plan.model import Plan
from launcher.request.request import Request, plan_request
from launcher.training.build import build_run
from launcher.training.engine.accelerator import build_accelerator
from launcher.training.engine.engine import Engine
from launcher.training.engine.run import TrainingRun, assemble_run, build_model
from launcher.training.loop import train
from launcher.training.observers.base import Observer
from tests.conftest import ROOT, find_parent

SEQUENCE_LENGTH = 64
VOCABULARY = 128
# Larger than the usual 0.02: attention of so small a base would otherwise weigh all tokens alike.
SPREAD = 0.1
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": SPREAD,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    ids: tuple[int, ...]
    trained: tuple[int, ...]  # 1: this token is predicted and counts

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


Packs = Sequence[Sequence[Document]]


def make_document(length: int, num_trained: int, seed: int) -> Document:
    """Random tokens; the last ones are trained, like an answer after its prompt."""
    assert 0 < num_trained < length
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, size=length)
    return Document(ids=tuple(ids.tolist()), trained=(0,) * (length - num_trained) + (1,) * num_trained)


def make_documents(count: int, seed: int = 0, longest: int = 40) -> list[Document]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(4, longest + 1, size=count).tolist()
    return [
        make_document(length, int(generator.integers(1, length)), seed * 1000 + index)
        for index, length in enumerate(lengths)
    ]


def pack_greedily(documents: Iterable[Document], capacity: int = SEQUENCE_LENGTH) -> list[list[Document]]:
    packs: list[list[Document]] = [[]]
    for document in documents:
        if sum(len(other.ids) for other in packs[-1]) + len(document.ids) > capacity:
            packs.append([])
        packs[-1].append(document)
    return packs


def pack_singly(documents: Iterable[Document]) -> list[list[Document]]:
    return [[document] for document in documents]


def make_uneven_packs() -> list[list[Document]]:
    """Ten packs that train about 56 tokens or 1 to 2 in turn, to expose a mean of means."""
    packs = []
    for index in range(10):
        trained = (20, 36) if index % 2 == 0 else (1, 1)
        packs.append(
            [make_document(22, trained[0], 100 + index), make_document(38 + index % 3, trained[1], 200 + index)]
        )
    return packs


def write_store(folder: Path, train: Packs, validation: Packs = ()) -> Store:
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    splits = {"train": train} | ({"validation": validation} if validation else {})
    for name, packs in splits.items():
        documents = [document for pack in packs for document in pack]
        starts = np.cumsum([0, *(len(pack) for pack in packs)]).astype(np.int64)
        with TokenSpool(folder, name, end_token_id=2) as spool:
            spool.add(_make_batch(documents))
            write_packs(scratch / f"{name}.arrow", spool, Packing(np.arange(len(documents), dtype=np.int64), starts))
            spool.remove()
    return publish(scratch, folder, "test", {"made of": repr(splits)})


def _make_batch(documents: Sequence[Document]) -> TokenBatch:
    count = len(documents)
    return TokenBatch(
        input_ids=np.array([token for document in documents for token in document.ids], dtype=np.int32),
        trained=np.array([flag for document in documents for flag in document.trained], dtype=np.uint8),
        lengths=np.array([len(document.ids) for document in documents], dtype=np.int32),
        rows=np.arange(count, dtype=np.int64),
        prompt_hashes=np.arange(count, dtype=np.uint64),
        excess=np.zeros(count, dtype=np.int64),
    )


def make_pack(documents: Sequence[Document]) -> Pack:
    batch = _make_batch(documents)
    return Pack(batch.input_ids, batch.trained, batch.lengths, batch.rows)


def make_config(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**SIZES, "tie_word_embeddings": True, **changes})


def write_base(folder: Path, config: PretrainedConfig | None = None, seed: int = 7) -> Path:
    """Random weights in fp32, norms included: with norms of one, a wrong norm would not show."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config or make_config(), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += SPREAD * torch.randn_like(parameter)
        model.save_pretrained(str(folder))
    return folder


def make_plan(base: Path, changes: Mapping[str, Any] | None = None) -> Plan:
    """Global batch 4, LoRA of rank 4, fp32, ten steps at most. Changes are dotted: {"batch.packed": False}."""
    tree = json.loads((ROOT / "experts/neo4j/manifest.json").read_text())
    tree["training"]["config"] |= {
        "max_seq_length": SEQUENCE_LENGTH,
        "batch_size": 4,
        "gradient_accumulation_steps": 1,
        "rank": 4,
        "alpha": 8,
        "learning_rate": 5e-3,
        "warmup_ratio": 0.2,
        "weight_decay": 0.01,
        "optim": "adamw_torch",
        "evaluation_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
    }
    manifest = base.parent / "manifest.json"
    manifest.write_text(json.dumps(tree))
    plan = plan_request(Request(expert=str(manifest), base=str(base), profile="full")).plan
    return vary(plan, changes or {})


def vary(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """Return a validated copy of the plan with changes."""
    tree = plan.model_dump()
    for path, value in changes.items():
        parent, key = find_parent(tree, path)
        parent[key] = value
    return Plan.model_validate(tree)


def split(micro_batch_size: int, accumulation: int) -> dict[str, Any]:
    return {
        "batch.micro_batch_size": micro_batch_size,
        "batch.gradient_accumulation_steps": accumulation,
    }


def adapt(kind: str, **changes: Any) -> dict[str, Any]:
    whole = {
        "kind": kind,
        "rank": 4 if kind in ("lora", "dora") else None,
        "alpha": 8 if kind in ("lora", "dora") else None,
        "target_modules": () if kind == "full" else ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
        "feedforward_modules": ("down_proj",) if kind == "ia3" else (),
        **changes,
    }
    return {f"adapter.{key}": value for key, value in whole.items()}


def make_recipe(targets: Sequence[str], **changes: Any) -> Recipe:
    """Memory-related settings of LoRA with rank 4 in fp32 on a CPU."""
    values: dict[str, Any] = {
        "adapter": "lora",
        "rank": 4,
        "target_modules": tuple(targets),
        "quantization": "none",
        "compute_dtype": "fp32",
        "base_dtype": "fp32",
        "trainable_dtype": "fp32",
        "optimizer": "adamw_torch",
        "checkpointing": "none",
        "compiled": False,
        "loss_kernel": "fused",
        "attention": "sdpa",
        "sequence_length": 24,
        "micro_batch_size": 2,
        "strategy": "single",
        "offload": "none",
        "num_ranks": 1,
        "on_gpu": False,
    }
    return Recipe(**{**values, **changes})


def reset_accelerate() -> None:
    """Reset accelerate's process-wide state, so that a second run starts like the first."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def build(plan: Plan, store: Store, root: Path, *, is_checked: bool = False) -> TrainingRun:
    """Build a run, with all checks, as the trainer does, or without the numerical ones, which take half of the time."""
    reset_accelerate()
    root.mkdir(parents=True, exist_ok=True)
    accelerator = build_accelerator(plan)
    if is_checked:
        run, _ = build_run(plan, RunPaths(root), store, (), accelerator)
        return run
    module = build_model(plan, (), accelerator.device)
    return assemble_run(plan, RunPaths(root), store, module, accelerator)


def with_engine(run: TrainingRun, kind: type[Engine]) -> TrainingRun:
    fields = {field.name: getattr(run.engine, field.name) for field in dataclasses.fields(Engine)}
    return dataclasses.replace(run, engine=kind(**fields))


class Recorder(Observer):
    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.evaluations: list[StepMetrics] = []

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:  # noqa: ARG002
        self.steps.append(metrics)

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:  # noqa: ARG002
        self.evaluations.append(metrics)
        return False

    def values(self, name: str) -> list[float]:
        return [step.values[name] for step in self.steps]

    @property
    def losses(self) -> list[float]:
        return self.values(metrics.TRAIN_LOSS)


def train_recorded(run: TrainingRun) -> Recorder:
    recorder = Recorder()
    train(run, recorder)
    return recorder


def trained_weights(run: TrainingRun) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in run.engine.module.named_parameters() if p.requires_grad}


def gradients(run: TrainingRun) -> dict[str, Tensor]:
    found = {}
    for name, parameter in run.engine.module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found[name] = parameter.grad.detach().clone()
    return found


def wake_adapter(run: TrainingRun) -> None:
    """Randomize LoRA's B, which starts at zero and would make half of the gradients zero."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in run.engine.module.named_parameters():
        if parameter.requires_grad and "lora_B" in name:
            with torch.no_grad():
                parameter.copy_(SPREAD * torch.randn(parameter.shape, generator=generator))


def relative_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference of a tensor, by norms."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).norm() / right[name].norm().clamp(min=1e-12)) for name in right)


def moved_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor], begin: Mapping[str, Tensor]) -> float:
    """Return the difference relative to the weight update, which is small compared with the weights."""
    assert left.keys() == right.keys() == begin.keys()
    return max(float((left[n] - right[n]).norm() / (right[n] - begin[n]).norm().clamp(min=1e-12)) for n in right)
