"""Known keys that training does not use, with the reason. `launcher validate` lists those in a file.

A test changes every other key and checks that the plan changes or that the value is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

# Reason -> keys of type Ignored.
WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "describes the published expert": (
        *("author", "homepage", "repository", "capabilities", "routing", "constraints", "perf", "runtime"),
        *("quality_metrics", "evaluation.test_cases", "evaluation.suite", "evaluation.metrics"),
        *(f"training.{key}" for key in ("trained_on", "base_model_version", "packaging_checkpoint", "checkpoint")),
        *(f"training.{key}" for key in ("quality_score", "test_scenarios", "alternative_checkpoints")),
    ),
    "describes a published adapter; training creates a new one": tuple(
        f"base_models.adapters.{key}" for key in ("path", "checkpoint_step", "size_bytes", "sha256")
    ),
    "signs the published package": ("integrity",),
    "soft prompts are not trained": ("soft_prompts",),
    "`name` and `revision` identify the base model": ("base_models.sha256",),
    "a setting of inference; training keeps the positions of the base model": ("base_models.rope_scaling",),
    "`training.config.adapter_type` decides": tuple(
        f"base_models.adapters.{key}" for key in ("type", "scaling", "use_dora")
    ),
    "`training.config.feedforward_modules` decides": ("base_models.adapters.feedforward_modules",),
    "grammars are not applied": ("training.decoding.use_grammar", "training.decoding.grammar_file"),
    "judges check answers": ("training.decoding.validation", "training.decoding.validation_cmd"),
    "a note on the origin of the rows": tuple(
        f"training.dataset.{key}" for key in ("source", "sources", "task_distribution", "format_distribution")
    ),
    "rules of another trainer; rows are used unchanged": (
        "training.dataset.validation",
        "training.dataset.augmentation",
    ),
    "rows are always tokenized once, before training": ("training.dataset.use_pretokenized",),
    "tokenized rows are memory-mapped": ("training.dataset.max_in_memory_samples",),
    "the launcher has its own fused and compiled training loop": ("training.config.use_unsloth",),
    "`attention` decides; every backend except eager is memory-efficient": (
        "training.config.memory_efficient_attention",
    ),
    "memory use is constant; emptying the cache only costs time": ("training.config.memory_clear_every",),
    '`gradient_checkpointing` decides: true, false or "selective"': ("training.config.activation_checkpointing",),
    "checkpointing is always non-reentrant": ("training.config.gradient_checkpointing_kwargs",),
    "the plan decides; `torch_compile_mode` reduce-overhead requests a CUDA graph": (
        "training.config.use_cuda_graphs",
    ),
    "a CUDA graph is captured as soon as possible": ("training.config.cuda_graph_warmup_steps",),
}
# Keys that are used, but not by training.
_USED_ELSEWHERE = {
    **dict.fromkeys(("description", "license", "tags", "limitations"), "shown in the model card"),
    "schema_version": "states the format version of the manifest",
    "training.decoding": "used by `launcher ask`, `launcher eval` and evaluations during training",
    "training.dataset.preprocessing": "a note on the origin of the rows (its row count serves as an estimate)",
}
NOT_USED = _USED_ELSEWHERE | {key: reason for reason, keys in WITHOUT_EFFECT.items() for key in keys}

_INDEX = re.compile(r"\[\d+\]")


class IgnoredKey(NamedTuple):
    """A key of a manifest that training does not use."""

    path: str
    reason: str


def find_ignored_keys(keys: Iterable[str]) -> tuple[IgnoredKey, ...]:
    """Return the given keys that training does not use, with the reason; a section without effect is one entry."""
    patterns = {key: _INDEX.sub("", key) for key in keys}
    return tuple(IgnoredKey(key, NOT_USED[pattern]) for key, pattern in patterns.items() if pattern in NOT_USED)
