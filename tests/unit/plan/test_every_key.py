"""Every key of the manifest is used, refused, or listed as not used with its reason. None is silently dropped.

Used means: changing the value changes the plan. The test tries a change for every key that is not listed as unused.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from launcher.errors import LauncherError
from launcher.gpus import find_gpu
from launcher.hardware import make_hardware
from launcher.manifest import Manifest
from launcher.manifest.unused import NOT_USED, find_unused
from launcher.plan import make_plan
from launcher.rows import probe_rows
from launcher.shapes import load_shape
from tests.conftest import ROOT, Tree

# A value for each key that differs from the neo4j expert's, with what else must be set for it to matter.
CHANGES: dict[str, dict[str, Any]] = {
    "name": {"name": "expert-other"},
    "base_models.name": {"base_models.0.name": "Qwen/Qwen3-1.7B"},
    "base_models.revision": {"base_models.0.revision": "abc"},
    "base_models.trust_remote_code": {"base_models.0.trust_remote_code": True, "base_models.0.revision": "abc"},
    "base_models.quantization": {"base_models.0.quantization": "int4"},
    "base_models.prompt_template": {"base_models.0.prompt_template": "alpaca"},
    "base_models.adapters.r": {"base_models.0.adapters.0.r": 8},
    "base_models.adapters.alpha": {"base_models.0.adapters.0.alpha": 8},
    "base_models.adapters.target_modules": {"base_models.0.adapters.0.target_modules": ["q_proj"]},
    "base_models.adapters.dropout": {"training.config.dropout": None, "base_models.0.adapters.0.dropout": 0.2},
    "training.dataset.path": {"training.dataset.path": "other/data"},
    "training.dataset.validation_path": {"training.dataset.validation_path": "v.jsonl"},
    "training.dataset.test_path": {"training.dataset.test_path": "t.jsonl"},
    "training.dataset.type": {"training.dataset.type": "huggingface", "training.dataset.format": None},
    "training.dataset.format": {"training.dataset.format": "parquet"},
    "training.dataset.revision": {"training.dataset.revision": "abc"},
    "training.dataset.streaming": {"training.dataset.streaming": True},
    "training.dataset.text_field": {"training.dataset.text_field": "body"},
    "training.dataset.tasks": {
        "training.dataset.type": "multi_task",
        "training.dataset.tasks": {"a": {"train": "a.jsonl", "weight": 1.0, "format": "jsonl"}},
    },
    "training.dataset.splits": {"training.dataset.splits": {"train": 7}},
    "training.config.adapter_type": {"training.config.adapter_type": "dora"},
    "training.config.rank": {"training.config.rank": 8},
    "training.config.alpha": {"training.config.alpha": 8},
    "training.config.dropout": {"training.config.dropout": 0.3},
    "training.config.target_modules": {"training.config.target_modules": ["q_proj"]},
    "training.config.feedforward_modules": {
        "training.config.adapter_type": "ia3",
        "training.config.rank": None,
        "training.config.alpha": None,
        "training.config.dropout": None,
        "training.config.feedforward_modules": ["down_proj"],
    },
    "training.config.epochs": {"training.config.epochs": 5},
    "training.config.num_epochs": {"training.config.epochs": None, "training.config.num_epochs": 5},
    "training.config.lr_scheduler_kwargs": {"training.config.lr_scheduler_kwargs": {"num_cycles": 2}},
    "training.config.warmup_steps": {"training.config.warmup_ratio": None, "training.config.warmup_steps": 9},
    "training.config.bf16": {"training.config.bf16": False},
    "training.config.fp16": {"training.config.bf16": False, "training.config.fp16": True},
    "training.config.use_sdpa": {"training.config.use_sdpa": True, "training.config.flash_attention_2": False},
    "training.config.flash_attention_2": {"training.config.flash_attention_2": False},
    "training.config.torch_compile_backend": {"training.config.torch_compile_backend": "eager"},
    "training.config.torch_compile_mode": {"training.config.torch_compile_mode": "max-autotune"},
    "training.config.eval_steps": {
        "training.config.load_best_model_at_end": False,
        "training.config.evaluation_strategy": "steps",
        "training.config.eval_steps": 9,
    },
    "training.config.save_steps": {
        "training.config.load_best_model_at_end": False,
        "training.config.save_strategy": "steps",
        "training.config.save_steps": 9,
    },
    "training.config.evaluation_strategy": {
        "training.config.load_best_model_at_end": False,
        "training.config.evaluation_strategy": "steps",
    },
    "training.config.eval_epochs": {"training.config.eval_epochs": 2},
    "training.config.save_epochs": {"training.config.save_epochs": 2},
    "training.config.attention": {"training.config.attention": "flex"},
    "training.config.strategy": {"training.config.strategy": "zero2"},
    "training.config.offload": {"training.config.offload": "optimizer"},
    "training.config.optim": {"training.config.optim": "sgd"},
    "training.config.lr_scheduler": {"training.config.lr_scheduler": "linear"},
    "training.config.loss_on": {"training.config.loss_on": "all"},
    "training.config.gradient_checkpointing": {"training.config.gradient_checkpointing": True},
    "training.config.save_strategy": {
        "training.config.load_best_model_at_end": False,
        "training.config.save_strategy": "no",
    },
    "training.config.pretokenized_cache": {"training.config.pretokenized_cache": "cache/x"},
}
for key in ("text", "messages", "system", "instruction", "input", "response"):
    CHANGES[f"training.dataset.field_mapping.{key}"] = {f"training.dataset.field_mapping.{key}": "other"}
CHANGES["training.dataset.field_mapping.output"] = {
    "training.dataset.field_mapping.response": None,
    "training.dataset.field_mapping.output": "o",
}
for key in ("project", "entity", "group", "name", "notes"):
    CHANGES[f"training.config.wandb.{key}"] = {f"training.config.wandb.{key}": "other"}
CHANGES["training.config.wandb.tags"] = {"training.config.wandb.tags": ["x"]}
CHANGES["training.config.wandb.artifacts"] = {"training.config.wandb.artifacts": ["adapter"]}
CHANGES["evaluation.judge"] = {"evaluation": {"judge": "sql"}}
CHANGES["evaluation.judge_command"] = {"evaluation": {"judge_command": ["judge"]}}
CHANGES["evaluation.task_rows"] = {"evaluation": {"task_rows": 5}}
CHANGES["evaluation.task_share"] = {"evaluation": {"task_share": 0.2}}
CHANGES["training.config.wandb.mode"] = {"training.config.wandb.mode": "disabled"}

# Keys whose value only ever decides between accepted and refused.
REFUSES: dict[str, dict[str, Any]] = {
    "training.config.method": {"training.config.method": "dpo"},
    "training.config.metric_for_best_model": {"training.config.metric_for_best_model": "eval_accuracy"},
    "training.config.greater_is_better": {"training.config.greater_is_better": True},
}
# Checked by their parts.
CONTAINERS = {"base_models", "base_models.adapters", "training", "training.dataset", "training.config"}
CONTAINERS |= {"training.config.wandb", "training.dataset.field_mapping", "evaluation"}
# The version of the expert names the run; nothing else about it is planned.
CARRIED = {"version"}


def every_key(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """All keys of the manifest's types that training may read: not inside sections that are unused as a whole."""
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        yield here
        if here in NOT_USED:
            continue
        for member in members(field.annotation):
            if isinstance(member, type) and issubclass(member, BaseModel):
                yield from every_key(member, here)


def members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, types.UnionType, tuple, Annotated):
        for argument in get_args(annotation):
            yield from members(argument)
    else:
        yield annotation


def set_path(tree: Any, path: str, value: Any) -> None:
    *above, key = path.split(".")
    for part in above:
        tree = tree[int(part)] if part.isdigit() else tree.setdefault(part, {})
    if value is None:
        tree.pop(key, None)
    else:
        tree[key] = value


def plan_text(tree: Tree) -> str:
    manifest = Manifest.model_validate(tree, strict=False)
    rows = probe_rows(manifest.training.dataset, ROOT)
    hardware = make_hardware(find_gpu("h100"), gpus_per_node=2, nodes=1)
    plan = make_plan(manifest, hardware, base=load_shape(manifest.base.name, ()), rows=rows)
    return plan.model_dump_json(exclude={"manifest_sha256"})


def without_comments(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: without_comments(value) for key, value in node.items() if key[0] not in "_$"}
    return [without_comments(item) for item in node] if isinstance(node, list) else node


SPLIT_PARTS = {f"training.dataset.splits.{part}" for part in ("train", "validation", "test", "total")}
TASK_PARTS = {f"training.dataset.tasks.{part}" for part in ("train", "valid", "test", "weight", "format")}
KEYS = [
    key
    for key in every_key(Manifest)
    if key not in NOT_USED
    and key not in CONTAINERS | CARRIED | SPLIT_PARTS | TASK_PARTS
    and key not in REFUSES
    and not key.startswith("training.config.lr_scheduler_kwargs.")
]


def other_value(current: Any) -> Any:
    """A different value of the same kind, for keys that need nothing special."""
    if isinstance(current, bool):
        return not current
    return current + 1 if isinstance(current, int) else current * 0.5 + 0.01


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_not_listed_as_unused_changes_the_plan(key: str, neo4j_tree: Tree) -> None:
    *preparation, change = (CHANGES.get(key) or {key: other_value(current_value(key, neo4j_tree))}).items()
    before, after = without_comments(neo4j_tree), without_comments(neo4j_tree)
    for path, value in preparation:
        set_path(after, path, value)
        if is_valid(after):  # dropping `epochs` is, only with `num_epochs` in its place
            before = without_comments(after)
    set_path(after, *change)
    assert plan_text(after) != plan_text(before), f"{key} is read by nothing: use it, refuse it, or list it in NOT_USED"


def current_value(key: str, tree: Tree) -> Any:
    """Of a key of training.config, absent ones by their default; a switch that is left to the plan counts as off."""
    name = key.removeprefix("training.config.")
    config = Manifest.model_validate(without_comments(tree), strict=False).training.config
    value = getattr(config, name)
    if value is not None:
        return value
    return False if "bool" in str(type(config).model_fields[name].annotation) else 0


def is_valid(tree: Tree) -> bool:
    try:
        plan_text(tree)
    except (LauncherError, ValueError):
        return False
    return True


@pytest.mark.parametrize("key", sorted(REFUSES))
def test_some_keys_are_refused(key: str, neo4j_tree: Tree) -> None:
    tree = without_comments(neo4j_tree)
    for path, value in REFUSES[key].items():
        set_path(tree, path, value)
    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
        Manifest.model_validate(tree, strict=False)


def test_unused_keys_are_keys_of_the_manifest() -> None:
    known = set(every_key(Manifest))
    assert set(NOT_USED) - known == set()
    assert all(reason.strip() for reason in NOT_USED.values())


def test_a_section_that_is_unused_as_a_whole_is_one_line() -> None:
    keys = [
        "routing",
        "routing.keywords",
        "training.config.use_unsloth",
        "training.config.rank",
        "base_models[1].sha256",
    ]
    assert [item.path for item in find_unused(keys)] == [
        "routing",
        "training.config.use_unsloth",
        "base_models[1].sha256",
    ]
