"""Secrets by format and by environment variable, in texts and in JSON files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.core.redaction import REDACTED, collect_known_secrets, redact_file, redact_text
from launcher.core.run_paths import write_text_atomically

A, B = "Ab1" * 20, "AB12" * 10
KEYS = [
    f"AKIA{B[:16]}",
    f"ASIA{B[:16]}",
    f"AIza{A[:35]}",
    f"xoxb-123456789012-{A[:24]}",
    f"xoxp-{A[:40]}",
    f"glpat-{A[:20]}",
    f"npm_{A[:36]}",
    f"hf_{A[:34]}",
    f"ghp_{A[:36]}",
    f"github_pat_{A[:22]}_{A[:58]}",
    f"sk-proj-{A[:40]}",
    f"sk-ant-api03-{A[:40]}-AA",
    f"eyJ{A[:30]}.eyJ{A[:30]}.{A[:30]}",
    f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n{A}\n{A}==\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{A}\n-----END PRIVATE KEY-----",
]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key[:12])
def test_keys_of_usual_services_are_redacted(key: str) -> None:
    for before, after in (("", ""), ("use ", " now"), ('{"a": "', '"}'), ("key=", "\n")):
        assert redact_text(f"{before}{key}{after}") == f"{before}{REDACTED}{after}"
    assert redact_file(Path("a.json"), json.dumps({"a": f"x {key} y"})) == json.dumps({"a": f"x {REDACTED} y"})


def test_a_cut_off_private_key_is_redacted_to_its_end() -> None:
    assert redact_text(f"see -----BEGIN OPENSSH PRIVATE KEY-----\n{A}\n{A}") == f"see {REDACTED}"


def test_an_aws_secret_is_known_by_its_name() -> None:
    assert redact_text(f"aws_secret_access_key = {A[:40]}") == f"aws_secret_access_key = {REDACTED}"
    assert redact_text(f"commit {'0a' * 20}") == f"commit {'0a' * 20}"


@pytest.mark.parametrize(
    "text", ["AKIAN", "task-force-of-the-united-nations", "hf_hub", "npm_config", "eyJ.eyJ.x", "xoxo"]
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact_text(text) == text


def test_long_runs_of_letters_are_fast() -> None:
    text = "a" * 300_000
    assert redact_text(text) == text


@pytest.mark.parametrize("secret", ["planted-value", 'with "quotes" \\ and é', "two\nlines of it", "12345678"])
def test_values_of_the_environment_are_redacted_in_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("MY_SECRET_KEY", secret)
    tree = {"a": [f"x{secret}y"], "b": 0.12345678, "c": 1, "d": "stays é"}
    for indent in (None, 2):
        for ascii_only in (True, False):
            write_text_atomically(tmp_path / "a.json", json.dumps(tree, indent=indent, ensure_ascii=ascii_only))
            found = json.loads((tmp_path / "a.json").read_text())
            assert found == {**tree, "a": [f"x{REDACTED}y"]}
    write_text_atomically(tmp_path / "README.md", f"x{secret}y")
    assert (tmp_path / "README.md").read_text() == f"x{REDACTED}y"


def test_words_and_the_working_directory_are_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"A_KEY": "disabled", "B_KEY": "short", "KEYS_DIR": str(tmp_path.parent), "C_KEY": " s3cret-value\n"}
    assert collect_known_secrets(environment) == ("s3cret-value",)
