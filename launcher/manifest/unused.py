"""The known keys that training does not use, each with its reason. `launcher validate` lists those that a file holds.

Every other key is read by the plan (a test changes each one and looks whether the plan changes) or refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_DESCRIBES = "describes the published expert; training does not read it"
_PUBLISHED_ADAPTER = "describes a published adapter; training makes a new one"
_GENERATION = "how the expert generates text: in `launcher ask`, `launcher eval` and a training's evaluations"
_PROVENANCE = "a note on where the rows came from; the rows are read from `path`"

NOT_USED: dict[str, str] = {
    "description": _DESCRIBES,
    "author": _DESCRIBES,
    "homepage": _DESCRIBES,
    "repository": _DESCRIBES,
    "license": _DESCRIBES,
    "tags": _DESCRIBES,
    "capabilities": _DESCRIBES,
    "limitations": _DESCRIBES,
    "routing": _DESCRIBES,
    "constraints": _DESCRIBES,
    "perf": _DESCRIBES,
    "runtime": _DESCRIBES,
    "quality_metrics": _DESCRIBES,
    "evaluation.test_cases": _DESCRIBES,
    "evaluation.suite": _DESCRIBES,
    "evaluation.metrics": _DESCRIBES,
    "integrity": "signs the published package; a training run makes a new one",
    "schema_version": "only says how the file is written",
    "soft_prompts": "soft prompts are not trained here, nor were they by the trainer of the published manifests",
    "base_models.sha256": "the base is identified by its name and `revision`",
    "base_models.rope_scaling": "a setting of the inference runtime; training keeps the base's own positions",
    "base_models.adapters.type": "`training.config.adapter_type` decides",
    "base_models.adapters.scaling": "`training.config.adapter_type` decides",
    "base_models.adapters.use_dora": "`training.config.adapter_type` decides",
    "base_models.adapters.feedforward_modules": "`training.config.feedforward_modules` decides",
    "base_models.adapters.path": _PUBLISHED_ADAPTER,
    "base_models.adapters.checkpoint_step": _PUBLISHED_ADAPTER,
    "base_models.adapters.size_bytes": _PUBLISHED_ADAPTER,
    "base_models.adapters.sha256": _PUBLISHED_ADAPTER,
    "training.decoding": _GENERATION,
    "training.trained_on": _DESCRIBES,
    "training.base_model_version": _DESCRIBES,
    "training.packaging_checkpoint": _DESCRIBES,
    "training.checkpoint": _DESCRIBES,
    "training.quality_score": _DESCRIBES,
    "training.test_scenarios": _DESCRIBES,
    "training.alternative_checkpoints": _DESCRIBES,
    "training.dataset.source": _PROVENANCE,
    "training.dataset.sources": _PROVENANCE,
    "training.dataset.task_distribution": _PROVENANCE,
    "training.dataset.format_distribution": _PROVENANCE,
    "training.dataset.preprocessing": _PROVENANCE + " (its row count serves as an estimate)",
    "training.dataset.validation": "rules of another trainer's loader; they are not applied to the rows",
    "training.dataset.augmentation": "never implemented by the trainer it was made for; rows are used as they are",
    "training.dataset.use_pretokenized": "rows are always tokenised once, ahead of training, and kept",
    "training.dataset.max_in_memory_samples": "prepared data is memory-mapped: no rows are held in memory",
    "training.config.use_unsloth": "the launcher runs its own packed, fused and compiled loop",
    "training.config.memory_efficient_attention": "`attention` decides; every backend but eager is memory-efficient",
    "training.config.memory_clear_every": "shapes are fixed, so memory stays flat; emptying the cache only costs time",
    "training.config.activation_checkpointing": '`gradient_checkpointing` decides: true, false or "selective"',
    "training.config.gradient_checkpointing_kwargs": "checkpointing is always the non-reentrant kind",
    "training.config.use_cuda_graphs": "the plan decides; `torch_compile_mode` reduce-overhead asks for a CUDA graph",
    "training.config.cuda_graph_warmup_steps": "a graph is recorded once it can be; no number of steps is waited for",
}

_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnusedKey:
    path: str
    reason: str


def find_unused(keys: Iterable[str]) -> tuple[UnusedKey, ...]:
    """The unused keys among those of a file; a whole unused section is one entry."""
    found = {}
    for key in keys:
        pattern = _INDEX.sub("", key)
        if pattern in NOT_USED:
            found[key] = UnusedKey(path=key, reason=NOT_USED[pattern])
    return tuple(found.values())
