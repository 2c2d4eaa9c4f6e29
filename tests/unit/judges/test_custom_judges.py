"""Judges of users, programs and classes: strict results, clear errors, no secrets, and only with trust."""

from __future__ import annotations

import json
import select
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError, LauncherError, RunFailedError
from launcher.judges.base import ReferenceRow, Verdict
from launcher.judges.external_command import MAX_REASON, CommandJudge
from launcher.judges.registry import open_judge, open_judge_by_name
from launcher.manifest import load_manifest
from tests.conftest import WriteManifest

pytestmark = pytest.mark.process

QUESTIONS = [ReferenceRow(instruction=f"question {number}", context="", reference="yes") for number in range(3)]
ANSWERS = ["yes", "no", "yes"]
JUDGE = """
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    right = row["answer"] == row["reference"]
    print(json.dumps({"right": right, "reason": "" if right else f"not {row['reference']}"}))
"""
CLASS = """
import os
from launcher.judges.base import Check, Verdict

class Own:
    checks = (Check(name="right", title="right", checker="own 1"), Check(name="kind", title="kind", checker="own 1"))
    main_check = "right"

    def judge(self, rows, answers):
        print("output of the judge")
        {body}

    def close(self):
        pass
"""


@pytest.fixture(autouse=True)
def _trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_TRUST", "1")


def judge_by_script(script: str, answers: list[str] | None = None) -> list[Verdict]:
    return CommandJudge([sys.executable, "-c", script]).judge(QUESTIONS, answers or ANSWERS)


def write_lines(*lines: object) -> str:
    return f"import sys; sys.stdout.buffer.write({b''.join(_as_line(line) for line in lines)!r})"


def _as_line(line: object) -> bytes:
    return line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() + b"\n"


RIGHT = {"right": True}


def test_a_command_returns_verdicts(write_manifest: WriteManifest) -> None:
    file = write_manifest({"evaluation": {"judge_command": [sys.executable, "-c", JUDGE]}})
    verdicts = open_judge(load_manifest(file).manifest).judge(QUESTIONS, ANSWERS)
    assert [verdict.checks for verdict in verdicts] == [{"right": True}, {"right": False}, {"right": True}]
    assert verdicts[1].reason == "not yes"


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r", "\\n"])
def test_a_reason_may_contain_any_character(character: str) -> None:
    lines = [{"right": False, "reason": f"a{character}b"}] * 3
    assert [verdict.reason for verdict in judge_by_script(write_lines(*lines))] == [f"a{character}b"] * 3
    assert judge_by_script(JUDGE, [f"a{character}b"] * 3)[0].checks == {"right": False}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; sys.exit('broken')", r"failed with exit code 1: broken"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"failed with exit code -11"),
        (write_lines(), "wrote 0 lines for 3 answers"),
        (write_lines({}), "wrote 1 lines for 3 answers"),
        (write_lines(RIGHT, RIGHT, RIGHT, RIGHT), "wrote 4 lines for 3 answers"),
        (write_lines(RIGHT, RIGHT, RIGHT, b"\n"), "wrote 4 lines for 3 answers"),
        (write_lines(RIGHT, {}, RIGHT), "wrote '{}' in line 2, not"),
        (write_lines(RIGHT, RIGHT, [True]), r"wrote '\[true\]' in line 3, not"),
        (write_lines(RIGHT, b"yes\n", RIGHT), "wrote 'yes' in line 2, not"),
        (write_lines(RIGHT, b"[" * 100_000 + b"\n", RIGHT), "in line 2, not"),
        (write_lines({"right": "false"}, RIGHT, RIGHT), r'wrote "right": "false" in line 1, not true or false'),
        (write_lines(RIGHT, {"right": 1}, RIGHT), r'wrote "right": 1 in line 2, not true or false'),
        (write_lines(RIGHT, {"right": None}, RIGHT), r'wrote "right": null in line 2, not true or false'),
        (write_lines(RIGHT, {"right": []}, RIGHT), r'wrote "right": \[\] in line 2, not true or false'),
        (write_lines(RIGHT, {"right": True, "reason": 5}, RIGHT), r'wrote "reason": 5 in line 2, not a string'),
        (write_lines(b"\xff\xfe\n", RIGHT, RIGHT), "wrote text that is not UTF-8"),
        (write_lines(RIGHT, b'{"right": false, "reason": "", "right": true}\n', RIGHT), "in line 2, not"),
        (write_lines(RIGHT, {"right": float("nan")}, RIGHT), r'wrote "right": NaN in line 2, not true or false'),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "wrote more than 32 MiB"),
        ("import os\nif os.fork(): os._exit(0)\nwhile True: os.write(1, b'x')", "wrote"),
    ],
)
def test_wrong_output_is_one_clear_error(script: str, words: str) -> None:
    with pytest.raises(RunFailedError, match=words):
        judge_by_script(script)


def test_processes_that_a_command_leaves_end_with_it() -> None:
    script = f"import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n{JUDGE}"
    with pytest.raises(RunFailedError, match=r"wrote 4 lines for 3 answers"):  # at once, though its output is open
        judge_by_script(script)
    lines = write_lines(RIGHT, RIGHT, {"right": True, "reason": "x" * 30_000})
    script = f"import subprocess; subprocess.Popen(['sleep', '600'])\n{lines}"
    assert len(judge_by_script(script)[2].reason) == MAX_REASON


def test_a_command_that_cannot_start_is_a_clear_error(tmp_path: Path) -> None:
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    plain.write_text("#!/bin/sh\n")
    broken.write_bytes(b"\x7fELF no program")
    broken.chmod(0o755)
    for command, words in (
        ("no-such-program", "no-such-program does not exist"),
        (str(plain), "Permission denied"),
        (str(tmp_path), "Permission denied"),
        (str(broken), "Exec format error"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(InputError, match=words):
            CommandJudge([command]).judge(QUESTIONS, ANSWERS)


def test_a_command_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_SETTING"):
        monkeypatch.setenv(name, "planted-value")
    script = "import os, json\nprint('\\n'.join([json.dumps({'right': False, 'reason': str(dict(os.environ))})] * 3))"
    assert "planted-value" not in judge_by_script(script)[0].reason


def open_class(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str = "own_judges:Own") -> Any:
    (folder / "own_judges.py").write_text(text)
    monkeypatch.chdir(folder)
    return closing(open_judge_by_name(name))


def test_a_class_judges_in_another_process_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "planted-value")
    body = "return [Verdict(checks={'right': a == 'yes', 'kind': None}, reason=str(dict(os.environ))) for a in answers]"
    with open_class(tmp_path, monkeypatch, CLASS.format(body=body)) as judge:
        assert [check.name for check in judge.checks] == ["right", "kind"]
        verdicts = judge.judge(QUESTIONS, ["yes", "n\u2028o", "\ud800"])
        assert judge.judge(QUESTIONS[:1], ["no"])[0].checks == {"right": False, "kind": None}
    assert [verdict.checks["right"] for verdict in verdicts] == [True, False, False]
    assert "planted-value" not in verdicts[0].reason
    assert "own_judges" not in sys.modules


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return None", "returned None for 3 answers"),
        ("return []", "returned 0 verdicts for 3 answers"),
        ("return [True] * 3", "returned True for answer 1, not a Verdict"),
        ("return [Verdict(checks={'right': 'false', 'kind': None})] * 3", "returned right = 'false' for answer 1, not"),
        ("return [Verdict(checks={'right': 1, 'kind': None})] * 3", "returned right = 1 for answer 1, not"),
        ("return [Verdict(checks={'right': True})] * 3", r"returned the checks \['right'\] for answer 1, not"),
        ("return [Verdict(checks={'right': True, 'kind': None}, reason=5)] * 3", "for answer 1, not a Verdict"),
        ("raise RuntimeError('no luck')", "failed: RuntimeError: no luck"),
        ("os._exit(3)", "exited with code 3"),
        ("raise SystemExit(4)", "exited with code 4"),
        ("os.write(3, b'{}\\n'); os._exit(0)", "replied more than once, or wrote other text|exited with code 0"),
        (
            "return [Verdict(checks={'right': float('nan'), 'kind': None})] * 3",
            "returned right = nan for answer 1, not",
        ),
    ],
)
def test_a_class_that_returns_something_else_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    with (
        open_class(tmp_path, monkeypatch, CLASS.format(body=body)) as judge,
        pytest.raises(RunFailedError, match=words),
    ):
        judge.judge(QUESTIONS, ANSWERS)


def test_a_reply_to_an_earlier_request_is_not_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that forks replies twice; the second reply is not taken for that of the next answers."""
    body = "os.fork(); return [Verdict(checks={'right': a == 'yes', 'kind': None}) for a in answers]"
    with open_class(tmp_path, monkeypatch, CLASS.format(body=body)) as judge:
        assert judge.judge(QUESTIONS[:1], ["yes"])[0].checks["right"] is True
        worker = judge._worker
        assert worker._unread or select.select([worker._stdout], [], [], 30)[0]  # the second reply has arrived
        with pytest.raises(RunFailedError, match="replied more than once"):
            judge.judge(QUESTIONS[:1], ["no"])


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("", "no_such_module:X", "cannot be loaded: No module named"),
        ("", "own_judges:X", "cannot be loaded: module 'own_judges' has no attribute 'X'"),
        ("X = object", "own_judges:X", "is not a judge: it has no checks"),
        ("def X(): raise OSError('no')", "own_judges:X", "cannot be instantiated: OSError: no"),
        ("x =", "own_judges:X", "cannot be loaded: invalid syntax"),
        (CLASS.replace('name="kind"', 'name="loss"'), "own_judges:Own", "has a check named loss"),
        (CLASS.replace('main_check = "right"', 'main_check = "x"'), "own_judges:Own", "its main_check 'x' is not one"),
        (CLASS.replace('name="kind"', 'name="right"'), "own_judges:Own", "names of checks must be unique"),
        (
            CLASS.replace('name="kind"', 'name="a/b\\u2028"'),
            "own_judges:Own",
            "names of checks must be unique",
        ),
        (CLASS.replace('title="kind"', "title=5"), "own_judges:Own", "is not a Check of three strings"),
        ("import os; os._exit(0)", "own_judges:X", "exited with code 0"),
    ],
)
def test_a_class_that_is_no_judge_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str, words: str
) -> None:
    with pytest.raises(LauncherError, match=words):
        open_class(tmp_path, monkeypatch, text.format(body="pass") if "{body}" in text else text, name)


@pytest.mark.parametrize("evaluation", [{"judge": "os:abort"}, {"judge_command": ["sh", "-c", "exit 1"]}])
def test_nothing_is_opened_without_trust(
    write_manifest: WriteManifest, monkeypatch: pytest.MonkeyPatch, evaluation: dict[str, Any]
) -> None:
    monkeypatch.delenv("LAUNCHER_TRUST")
    with pytest.raises(InputError, match=r"only with --trust: evaluation\.judge"):
        open_judge(load_manifest(write_manifest({"evaluation": evaluation})).manifest)
