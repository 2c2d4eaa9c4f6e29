"""The JSON Schema that `launcher schema` prints accepts the same manifests as the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from launcher.manifest.json_schema import render_json_schema
from tests.conftest import ROOT, Tree, expert_manifests, published_manifests

VALIDATOR = jsonschema.Draft202012Validator(json.loads(render_json_schema()))


def test_committed_schema_is_current() -> None:
    committed = (ROOT / "experts/manifest.schema.json").read_text()
    assert committed == render_json_schema(), "run `make schema`"


def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(render_json_schema()))


@pytest.mark.parametrize(
    "file", [*published_manifests(), *expert_manifests()], ids=lambda f: f"{f.parent.name}/{f.name}"
)
def test_schema_accepts_every_manifest(file: Path) -> None:
    VALIDATOR.validate(json.loads(file.read_text()))


def test_schema_rejects_misspelled_key(neo4j_tree: Tree) -> None:
    config = {**neo4j_tree["training"]["config"], "bacth_size": 4}
    tree = {**neo4j_tree, "training": {**neo4j_tree["training"], "config": config}}
    (error,) = VALIDATOR.iter_errors(tree)
    assert "bacth_size" in error.message


def test_own_manifests_reference_the_schema() -> None:
    for file in expert_manifests():
        assert (
            file.parent / json.loads(file.read_text())["$schema"]
        ).resolve() == ROOT / "experts/manifest.schema.json"
