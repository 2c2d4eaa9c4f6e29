"""Published manifests and those of this project load unchanged and keep their meaning."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from launcher.core.errors import ManifestError
from launcher.manifest import Manifest, load_manifest, manifest_sha256
from launcher.manifest.ignored_keys import WITHOUT_EFFECT
from tests.conftest import EXPERTS, ROOT, Tree, expert_manifests, published_manifests

pytestmark = pytest.mark.long

PUBLISHED = published_manifests()
needs_published = pytest.mark.skipif(not PUBLISHED, reason="needs the published manifests next to the checkout")
ALL = [*PUBLISHED, *expert_manifests()]
IGNORED = {key for keys in WITHOUT_EFFECT.values() for key in keys} | {"adapters.type"}
OPEN_OBJECTS = ("training.dataset.preprocessing.", "training.dataset.splits.")
USED_NOTES = {
    "training.dataset.preprocessing.processed_examples",
    "training.dataset.preprocessing.total_examples",
    "training.dataset.splits.train",
}


def get_id(file: Path) -> str:
    return file.name if file.parent.name == "manifests" else file.parent.name


def test_the_wheel_has_the_experts_that_the_tests_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    folders = {name for name in included if name.startswith("experts/") and not name.endswith(".json")}
    assert folders == {f"experts/{name}" for name in EXPERTS}


@pytest.mark.parametrize("file", ALL, ids=get_id)
def test_values_of_the_file_are_loaded(file: Path) -> None:
    raw = json.loads(file.read_text())["training"]["config"]
    config = load_manifest(file).manifest.training.config
    assert config.learning_rate == raw["learning_rate"]
    assert config.global_batch_size == raw["batch_size"] * raw["gradient_accumulation_steps"]
    assert config.rank == raw["rank"]
    assert config.alpha == raw["alpha"]
    assert list(config.target_modules) == raw["target_modules"]
    assert config.num_train_epochs == raw["epochs"]
    assert config.warmup_steps == raw.get("warmup_steps", 0)
    assert config.lr_scheduler == raw["lr_scheduler"]


@pytest.mark.parametrize("file", ALL, ids=get_id)
def test_absent_learning_keys_have_the_published_defaults(file: Path) -> None:
    raw = json.loads(file.read_text())["training"]["config"]
    config = load_manifest(file).manifest.training.config
    assert config.packing is raw.get("packing", False)
    assert config.loss_on == raw.get("loss_on", "all")
    assert config.max_grad_norm == raw.get("max_grad_norm", 1.0)
    assert config.seed == raw.get("seed", 42)
    assert config.max_seq_length == raw.get("max_seq_length", 2048)
    assert config.weight_decay == raw.get("weight_decay", 0.0)
    assert config.save_total_limit == raw.get("save_total_limit", 3)


@pytest.mark.parametrize("file", ALL, ids=get_id)
def test_absent_execution_keys_are_none(file: Path) -> None:
    raw = json.loads(file.read_text())["training"]["config"]
    config = load_manifest(file).manifest.training.config
    for key in (
        "bf16",
        "fp16",
        "use_tf32",
        "optim",
        "torch_compile",
        "dataloader_num_workers",
        "gradient_checkpointing",
    ):
        assert getattr(config, key) == raw.get(key)


@needs_published
def test_schema_1_is_upgraded() -> None:
    (file,) = (f for f in PUBLISHED if f.name.endswith("fixture_v1.json"))
    manifest = load_manifest(file).manifest
    assert manifest.base.name == "Qwen3-0.6B"
    assert manifest.base.quantization == "int4"
    assert manifest.base.adapters[0].r == 16
    assert manifest.schema_version == "2.0"
    assert load_manifest(file).schema_version == "1.0"


@pytest.mark.parametrize("file", expert_manifests(), ids=get_id)
def test_own_manifests_conform_to_the_published_schema(file: Path, published_schema: Tree) -> None:
    jsonschema.Draft7Validator(published_schema).validate(json.loads(file.read_text()))


def misspell(key: str) -> str:
    """Swap two adjacent letters, or double a single letter."""
    for i in [*range(len(key) // 2, len(key) - 1), *range(len(key) // 2)]:
        if i + 1 < len(key) and key[i] != key[i + 1]:
            return key[:i] + key[i + 1] + key[i] + key[i + 2 :]
    return key * 2


def list_checked_keys(node: Any, path: str = "") -> Iterator[tuple[Tree, str]]:
    """Yield each object with each of its keys, except comments, values of ignored keys, and notes."""
    if isinstance(node, dict):
        for key in [key for key in node if not key.startswith(("_", "$"))]:
            here = f"{path}.{key}" if path else key
            if not here.startswith(OPEN_OBJECTS) or here in USED_NOTES:
                yield node, key
            if here not in IGNORED:
                yield from list_checked_keys(node[key], here)
    elif isinstance(node, list):
        for item in node:
            yield from list_checked_keys(item, path)


@pytest.mark.parametrize("file", ALL, ids=get_id)
def test_misspelling_of_each_key_is_refused_with_a_suggestion(file: Path, tmp_path: Path) -> None:
    tree = json.loads(file.read_text())
    target = tmp_path / "manifest.json"
    tried = 0
    for node, key in list(list_checked_keys(tree)):
        before = dict(node)
        node.clear()
        node.update({misspell(key) if name == key else name: value for name, value in before.items()})
        target.write_text(json.dumps(tree))
        with pytest.raises(ManifestError) as caught:
            load_manifest(target)
        node.clear()
        node.update(before)
        (problem,) = caught.value.problems
        assert problem.where.endswith(misspell(key))
        assert problem.what == f"unknown key; did you mean {key}?"
        tried += 1
    assert tried > 25


def test_hash_is_independent_of_formatting(tmp_path: Path, neo4j_tree: Tree) -> None:
    def reverse(node: Any) -> Any:
        return {key: reverse(node[key]) for key in reversed(node)} if isinstance(node, dict) else node

    hashes = []
    tag = {**neo4j_tree, "tags": ["another"]}
    for number, tree in enumerate((neo4j_tree, reverse(neo4j_tree), tag)):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(tree, indent=number))
        hashes.append(manifest_sha256(load_manifest(file).manifest))
    assert hashes[0] == hashes[1] != hashes[2]


def test_comments_are_allowed_in_every_object(tmp_path: Path, neo4j_tree: Tree) -> None:
    def with_comments(node: Any) -> Any:
        if isinstance(node, dict):
            return {"_note": {"any": ["thing", 1]}, **{key: with_comments(value) for key, value in node.items()}}
        return [with_comments(item) for item in node] if isinstance(node, list) else node

    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(with_comments(neo4j_tree)))
    assert load_manifest(file).manifest == Manifest.model_validate_json(
        load_manifest(Path("experts/neo4j/manifest.json")).manifest.model_dump_json()
    )
