"""The judge of an expert, and custom judges."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError, RunFailedError
from launcher.judges.base import ReferenceRow
from launcher.judges.external_command import CommandJudge
from launcher.judges.registry import open_judge, resolve_judge_name
from launcher.manifest import load_manifest
from tests.conftest import WriteManifest, expert_manifests, published_manifests

QUESTIONS = [ReferenceRow(instruction=f"question {number}", context="", reference="yes") for number in range(3)]
JUDGE = """
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    right = row["answer"] == row["reference"]
    print(json.dumps({"right": right, "reason": "" if right else f"not {row['reference']}"}))
"""


@pytest.mark.parametrize("file", expert_manifests(), ids=lambda file: file.parent.name)
def test_bundled_experts_have_a_judge(file: Path) -> None:
    language = {"neo4j": "cypher"}.get(file.parent.name, file.parent.name)
    assert resolve_judge_name(load_manifest(file).manifest) == language


@pytest.mark.parametrize("file", published_manifests(), ids=lambda file: file.name)
def test_published_experts_have_a_judge(file: Path) -> None:
    manifest = load_manifest(file).manifest
    known = None if manifest.name.startswith("test-") else {"neo4j": "cypher"}.get(manifest.expert, manifest.expert)
    assert resolve_judge_name(manifest) == known


def open_named(write_manifest: WriteManifest, changes: dict[str, Any]) -> Any:
    return open_judge(load_manifest(write_manifest(changes)).manifest)


class Own:
    """As somebody else would write one."""

    checks = ()
    main_check = "x"

    def judge(self, rows: Any, answers: Any) -> list[Any]:  # noqa: ARG002
        return []

    def close(self) -> None:
        pass


def test_custom_judge_class_is_loaded(write_manifest: WriteManifest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("own_judges")
    module.Own, module.NoJudge = Own, object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_judges", module)
    assert isinstance(open_named(write_manifest, {"evaluation": {"judge": "own_judges:Own"}}), Own)
    with pytest.raises(InputError, match="own_judges:NoJudge is not a judge: it has no checks"):
        open_named(write_manifest, {"evaluation": {"judge": "own_judges:NoJudge"}})
    with pytest.raises(InputError, match="cannot be loaded"):
        open_named(write_manifest, {"evaluation": {"judge": "no_such_module:X"}})
    with pytest.raises(InputError, match="'prolog' is neither one of json, sql, cypher, typescript nor"):
        open_named(write_manifest, {"evaluation": {"judge": "prolog"}})


def test_expert_without_a_judge_is_an_error(write_manifest: WriteManifest) -> None:
    with pytest.raises(InputError, match="no judge for this expert's answers") as raised:
        open_named(write_manifest, {"name": "expert-prolog", "training.decoding": None})
    assert "evaluation.judge_command" in str(raised.value)


def test_judge_command_returns_verdicts(write_manifest: WriteManifest) -> None:
    judge = open_named(write_manifest, {"evaluation": {"judge_command": [sys.executable, "-c", JUDGE]}})
    verdicts = judge.judge(QUESTIONS, ["yes", "no", "yes"])
    assert [verdict.checks for verdict in verdicts] == [{"right": True}, {"right": False}, {"right": True}]
    assert verdicts[1].reason == "not yes"


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; sys.exit('broken')", r"failed \(1\): broken"),
        ("print('{}')", "wrote 1 lines for 3 answers"),
        ("print('{}\\n{}\\n{}')", "must write"),
    ],
)
def test_failing_judge_command_is_an_error(script: str, words: str) -> None:
    with pytest.raises(RunFailedError, match=words):
        CommandJudge([sys.executable, "-c", script]).judge(QUESTIONS, ["a", "b", "c"])


def test_missing_judge_command_is_an_error() -> None:
    with pytest.raises(InputError, match=r"judge_command: no-such-program does not exist"):
        CommandJudge(["no-such-program"]).judge(QUESTIONS, ["a", "b", "c"])
