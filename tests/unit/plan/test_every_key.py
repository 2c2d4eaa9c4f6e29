"""Every key of the manifest is used, refused, or listed as not used with a reason.

A key is used if a change of its value changes the plan. The test changes every key that is not listed as unused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launcher.base_models.shapes import load_shape
from launcher.core.errors import LauncherError
from launcher.corpus.first_rows import probe_rows
from launcher.hardware.gpu_catalogue import lookup_gpu
from launcher.hardware.model import make_hardware
from launcher.manifest import Manifest
from launcher.manifest.ignored_keys import NOT_USED, WITHOUT_EFFECT, find_ignored_keys
from launcher.manifest.strict_model import find_models, is_ignored
from launcher.plan import make_plan
from tests.conftest import ROOT, Tree

pytestmark = pytest.mark.long

# For each key, a value that differs from the neo4j expert's, after other keys that it depends on.
CHANGES: dict[str, dict[str, Any]] = {
    "name": {"name": "expert-other"},
    "base_models.name": {"base_models.0.name": "Qwen/Qwen3-1.7B"},
    "base_models.revision": {"base_models.0.revision": "abc"},
    "base_models.trust_remote_code": {"base_models.0.trust_remote_code": True, "base_models.0.revision": "abc"},
    "base_models.quantization": {"base_models.0.quantization": "int4"},
    "base_models.prompt_template": {"base_models.0.prompt_template": "alpaca"},
    "base_models.chat_template": {
        "base_models.0.chat_template": "t.jinja",
        "base_models.0.prompt_template": "tokenizer",
    },
    "base_models.end_token": {"base_models.0.end_token": "<|endoftext|>"},
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
    "training.dataset.max_rows": {"training.dataset.max_rows": 100},
    "training.dataset.text_field": {"training.dataset.text_field": "body"},
    "training.dataset.tasks": {
        "training.dataset.type": "multi_task",
        "training.dataset.tasks": {"a": {"train": "a.jsonl", "weight": 1.0, "format": "jsonl"}},
    },
    "training.dataset.system_prompt": {"training.dataset.system_prompt": "Be brief."},
    "training.dataset.splits": {"training.dataset.splits": {"train": 7}},
    "training.config.adapter_type": {"training.config.adapter_type": "dora"},
    "training.config.rank": {"training.config.rank": 8},
    "training.config.loraplus_lr_ratio": {"training.config.loraplus_lr_ratio": 16.0},
    "training.config.alpha": {"training.config.alpha": 8},
    "training.config.dropout": {"training.config.dropout": 0.3},
    "training.config.target_modules": {"training.config.target_modules": ["q_proj"]},
    "training.config.target_parameters": {
        "base_models.0.name": "Qwen/Qwen3-30B-A3B",
        "training.config.target_modules": ["q_proj"],
        "training.config.target_parameters": ["mlp.experts.down_proj"],
    },
    "training.config.modules_to_save": {"training.config.modules_to_save": ["embed_tokens"]},
    "training.config.init_lora_weights": {"training.config.init_lora_weights": "pissa"},
    "training.config.new_tokens": {"training.config.new_tokens": ["<a>"]},
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
    "training.config.torch_compile_backend": {
        "training.config.torch_compile": True,
        "training.config.torch_compile_backend": "eager",
    },
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
CHANGES["training.config.report_to"] = {"training.config.report_to": ["tensorboard"]}
CHANGES["training.config.wandb.tags"] = {"training.config.wandb.tags": ["x"]}
CHANGES["training.config.wandb.artifacts"] = {"training.config.wandb.artifacts": ["adapter"]}
CHANGES["training.config.metric_for_best_model"] = {
    "training.config.metric_for_best_model": "eval/matches",
    "training.config.greater_is_better": None,
}
CHANGES["evaluation.judge"] = {"evaluation": {"judge": "sql"}}
CHANGES["evaluation.judge_command"] = {"evaluation": {"judge_command": ["judge"]}}
CHANGES["evaluation.task_rows"] = {"evaluation": {"task_rows": 5}}
CHANGES["evaluation.task_share"] = {"evaluation": {"task_share": 0.2}}
CHANGES["training.config.precision"] = {"training.config.precision": "fp16"}
CHANGES["training.config.wandb.mode"] = {"training.config.wandb.mode": "disabled"}

# Keys with a single supported value.
REFUSES: dict[str, dict[str, Any]] = {
    "training.config.method": {"training.config.method": "dpo"},
    "training.config.greater_is_better": {"training.config.greater_is_better": True},
    # Full fine-tuning on one GPU only: test_full_finetuning.py
    "training.config.bf16_stochastic_round": {"training.config.bf16_stochastic_round": True},
    "training.config.optimizer_in_bwd": {"training.config.optimizer_in_bwd": True},
}
# Objects whose keys are tested.
CONTAINERS = {"base_models", "base_models.adapters", "training", "training.dataset", "training.config"}
CONTAINERS |= {"training.config.wandb", "training.dataset.field_mapping", "evaluation"}
# Recorded, without influence on the plan.
RECORDED = {"version"}


def list_fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key of a model as a dotted path, with its field."""
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        yield here, field
        for inner in find_models(field.annotation):
            yield from list_fields(inner, here)


def set_path(tree: Any, path: str, value: Any) -> None:
    *above, key = path.split(".")
    for part in above:
        tree = tree[int(part)] if part.isdigit() else tree.setdefault(part, {})
    if value is None:
        tree.pop(key, None)
    else:
        tree[key] = value


def render_plan(tree: Tree) -> str:
    manifest = Manifest.model_validate(tree, strict=False)
    rows = probe_rows(manifest.training.dataset, ROOT)
    hardware = make_hardware(lookup_gpu("h100"), gpus_per_node=2, nodes=1)
    plan = make_plan(manifest, hardware, base=load_shape(manifest.base.name, ()), rows=rows)
    return plan.model_dump_json(exclude={"manifest_sha256"})


def without_comments(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: without_comments(value) for key, value in node.items() if key[0] not in "_$"}
    return [without_comments(item) for item in node] if isinstance(node, list) else node


SPLIT_PARTS = {"training.dataset.splits.train"}
TASK_PARTS = {f"training.dataset.tasks.{part}" for part in ("train", "valid", "test", "weight", "format")}
KEYS = [
    key
    for key, _ in list_fields(Manifest)
    if not any(f"{key}.".startswith(f"{path}.") for path in NOT_USED)
    and key not in CONTAINERS | RECORDED | SPLIT_PARTS | TASK_PARTS
    and key not in REFUSES
    and not key.startswith("training.config.lr_scheduler_kwargs.")
]


def change_value(current: Any) -> Any:
    """Return a different value of the same type."""
    if isinstance(current, bool):
        return not current
    return current + 1 if isinstance(current, int) else current * 0.5 + 0.01


@pytest.mark.parametrize("key", KEYS)
def test_key_not_listed_as_unused_changes_the_plan(key: str, neo4j_tree: Tree) -> None:
    *preparation, change = (CHANGES.get(key) or {key: change_value(get_current_value(key, neo4j_tree))}).items()
    before, after = without_comments(neo4j_tree), without_comments(neo4j_tree)
    for path, value in preparation:
        set_path(after, path, value)
        if is_valid(after):  # `epochs` can only be removed together with adding `num_epochs`
            before = without_comments(after)
    set_path(after, *change)
    assert render_plan(after) != render_plan(before), f"{key} has no effect: use, refuse or ignore it"


def get_current_value(key: str, tree: Tree) -> Any:
    """Return the value of a key in training.config; a switch that the plan decides counts as off."""
    name = key.removeprefix("training.config.")
    config = Manifest.model_validate(without_comments(tree), strict=False).training.config
    value = getattr(config, name)
    if value is not None:
        return value
    return False if "bool" in str(type(config).model_fields[name].annotation) else 0


def is_valid(tree: Tree) -> bool:
    try:
        render_plan(tree)
    except (LauncherError, ValueError):
        return False
    return True


@pytest.mark.parametrize("key", sorted(REFUSES))
def test_unsupported_value_is_refused(key: str, neo4j_tree: Tree) -> None:
    tree = without_comments(neo4j_tree)
    for path, value in REFUSES[key].items():
        set_path(tree, path, value)
    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
        Manifest.model_validate(tree, strict=False)


def test_unused_keys_are_keys_of_the_manifest() -> None:
    assert set(NOT_USED) - set(dict(list_fields(Manifest))) == set()


def test_keys_without_effect_are_those_of_type_ignored() -> None:
    ignored = {key for key, field in list_fields(Manifest) if is_ignored(field.annotation)}
    assert ignored == {key for keys in WITHOUT_EFFECT.values() for key in keys}


def test_unused_section_is_one_entry() -> None:
    keys = [
        "routing",
        "routing.keywords",
        "training.config.use_unsloth",
        "training.config.rank",
        "base_models[1].sha256",
    ]
    assert [item.path for item in find_ignored_keys(keys)] == [
        "routing",
        "training.config.use_unsloth",
        "base_models[1].sha256",
    ]
