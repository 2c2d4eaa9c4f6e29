"""Which judge an evaluation uses if the expert's manifest changed after the training."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.judges.registry import resolve_judge_name
from launcher.manifest import load_manifest
from launcher.manifest.trust import TRUST_VARIABLE
from launcher.training.inference.eval import choose_judge
from tests.conftest import WriteManifest


def make_run(file: Path) -> Any:
    manifest = load_manifest(file).manifest
    return SimpleNamespace(
        manifest=manifest, plan=SimpleNamespace(expert=str(file)), paths=SimpleNamespace(run_id="neo4j-1")
    )


def change(file: Path, evaluation: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "evaluation": evaluation}))


def test_named_expert_is_judged_by_its_manifest(
    write_manifest: WriteManifest, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_manifest()
    run = make_run(file)
    assert choose_judge(run, str(file)) is run.manifest
    assert capfd.readouterr().err == ""
    change(file, {"judge": "sql"})
    assert resolve_judge_name(choose_judge(run, str(file))) == "sql"
    assert f"note: judged by sql, as in {file}; the run was trained with cypher" in capfd.readouterr().err
    change(file, {"judge_command": ["./judge", "--strict"]})
    with pytest.raises(InputError, match="executed only with --trust"):
        choose_judge(run, str(file))
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    evaluation = choose_judge(run, str(file)).evaluation
    assert evaluation is not None
    assert evaluation.judge_command == ("./judge", "--strict")


def test_run_alone_is_judged_as_it_was_trained_with_a_note(
    write_manifest: WriteManifest, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_manifest()
    run = make_run(file)
    change(file, {"judge_command": ["./judge"]})
    assert choose_judge(run, None) is run.manifest
    error = capfd.readouterr().err
    assert f"note: judged by cypher, as in the run's manifest; {file} now names judge_command ./judge" in error
    assert f"`launcher eval {file} --run neo4j-1` uses it" in error
    file.unlink()
    assert choose_judge(run, None) is run.manifest


def test_run_without_a_judge_is_not_judged(write_manifest: WriteManifest, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_manifest({"name": "expert-tickets"}, drop=("training.decoding",))
    run = make_run(file)
    change(file, {"judge": "sql"})
    assert choose_judge(run, None) is run.manifest
    assert f"note: not judged, as in the run's manifest; {file} now names sql" in capfd.readouterr().err
    judged = make_run(file)
    write_manifest({"name": "expert-tickets"}, drop=("training.decoding",))
    choose_judge(judged, str(file))
    assert f"note: not judged, as in {file}; the run was trained with sql" in capfd.readouterr().err
