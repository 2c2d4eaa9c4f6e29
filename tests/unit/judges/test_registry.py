"""The judge of an expert."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.judges.registry import list_check_names, open_judge, resolve_judge_name
from launcher.manifest import load_manifest
from launcher.manifest.trust import TRUST_VARIABLE
from tests.conftest import WriteManifest, expert_manifests, published_manifests


@pytest.mark.parametrize("file", expert_manifests(), ids=lambda file: file.parent.name)
def test_bundled_experts_have_a_judge(file: Path) -> None:
    language = {"neo4j": "cypher"}.get(file.parent.name, file.parent.name)
    assert resolve_judge_name(load_manifest(file).manifest) == language


@pytest.mark.parametrize("file", published_manifests(), ids=lambda file: file.name)
def test_published_experts_have_a_judge(file: Path) -> None:
    manifest = load_manifest(file).manifest
    known = None if manifest.name.startswith("test-") else {"neo4j": "cypher"}.get(manifest.expert, manifest.expert)
    assert resolve_judge_name(manifest) == known


@pytest.mark.parametrize("file", expert_manifests(), ids=lambda file: file.parent.name)
def test_known_check_names_are_those_of_the_judge(file: Path) -> None:
    manifest = load_manifest(file).manifest
    with closing(open_judge(manifest)) as judge:
        assert list_check_names(manifest) == tuple(check.name for check in judge.checks)


def test_a_judge_command_has_one_check(write_manifest: WriteManifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    manifest = load_manifest(write_manifest({"evaluation": {"judge_command": ["true"]}})).manifest
    assert list_check_names(manifest) == tuple(check.name for check in open_judge(manifest).checks)


def open_named(write_manifest: WriteManifest, changes: dict[str, Any]) -> Any:
    return open_judge(load_manifest(write_manifest(changes)).manifest)


def test_an_unknown_judge_is_an_error(write_manifest: WriteManifest) -> None:
    with pytest.raises(InputError, match="'prolog' is neither one of json, sql, cypher, typescript, exact_match nor"):
        open_named(write_manifest, {"evaluation": {"judge": "prolog"}})


@pytest.mark.parametrize(("name", "closest"), [("sqll", "sql"), ("typscript", "typescript"), ("neo4", "cypher")])
def test_a_misspelled_judge_is_refused_before_it_is_opened(
    write_manifest: WriteManifest, name: str, closest: str
) -> None:
    manifest = load_manifest(write_manifest({"evaluation": {"judge": name}})).manifest
    with pytest.raises(InputError) as raised:
        resolve_judge_name(manifest)
    assert raised.value.hint == f"did you mean {closest}?"


def test_expert_without_a_judge_is_an_error(write_manifest: WriteManifest) -> None:
    with pytest.raises(InputError, match="no judge for this expert's answers") as raised:
        open_named(write_manifest, {"name": "expert-prolog", "training.decoding": None})
    assert "evaluation.judge_command" in str(raised.value)
