"""Secrets by format and by environment variable, in texts and in JSON files."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlencode

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
    f"ya29.{A[:40]}",
    f"GOCSPX-{A[:28]}",
    f"pypi-{A[:60]}",
    f"dckr_pat_{A[:27]}",
    f"nvapi-{A[:60]}",
    f"gsk_{A[:52]}",
    f"r8_{A[:37]}",
    f"dapi{'0a' * 16}",
    f"hvs.{A[:24]}",
    f"sk_live_{A[:24]}",
    f"whsec_{A[:32]}",
    f"SG.{A[:22]}.{A[:43]}",
    f"key-{'0a' * 16}",
    f"SK{'0a' * 16}",
    f"123456789:AA{A[:33]}",
    f"pplx-{A[:48]}",
    f"shpat_{'0a' * 16}",
    f"lin_api_{A[:40]}",
    f"dp.pt.{A[:43]}",
    f"ATATT3{A[:60]}",
    f"AGE-SECRET-KEY-1{'A1' * 29}",
    f"glsa_{A[:32]}_0a0a0a0a",
    f"lsv2_pt_{'0a' * 16}_0a0a0a0a",
]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key[:12])
def test_keys_of_usual_services_are_redacted(key: str) -> None:
    for before, after in (("", ""), ("use ", " now"), ('{"a": "', '"}'), ("key=", "\n"), ("MY_", " "), ("?x%3D", "&y")):
        assert redact_text(f"{before}{key}{after}") == f"{before}{REDACTED}{after}"
    assert redact_file(Path("a.json"), json.dumps({"a": f"x {key} y"})) == json.dumps({"a": f"x {REDACTED} y"})


def test_a_cut_off_private_key_is_redacted_to_its_end() -> None:
    assert redact_text(f"see -----BEGIN OPENSSH PRIVATE KEY-----\n{A}\n{A}") == f"see {REDACTED}"


def test_an_aws_secret_is_known_by_its_name() -> None:
    assert redact_text(f"aws_secret_access_key = {A[:40]}") == f"aws_secret_access_key = {REDACTED}"
    assert redact_text(f"commit {'0a' * 20}") == f"commit {'0a' * 20}"


@pytest.mark.parametrize(
    "text",
    [
        *("AKIAN", "task-force-of-the-united-nations", "hf_hub", "npm_config", "eyJ.eyJ.x", "xoxo"),
        *("basic understanding-of-things", "https://host/a?page=2&tokens=5", "password: see the manual, page 12345678"),
        *(
            "secret_santa_list_of_all_the_participants_x",
            "fig_1",
            "SG.model.layers",
            "PWD=/data/user1/runs",
            "key-value",
        ),
        *("pad_token: <|endoftext|>", "api_key is missing", "at 1234567.890123 tokens/s"),
    ],
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


FORMS = {
    "plain": lambda secret: secret,
    "query": lambda secret: urlencode({"a": secret}),
    "path": lambda secret: quote(secret, safe=""),
    "json": json.dumps,
    "repr": repr,
    "hex": lambda secret: secret.encode().hex(),
    "HEX": lambda secret: secret.encode().hex().upper(),
    "every character in percent": lambda secret: "".join(f"%{byte:02X}" for byte in secret.encode()),
    "base32": lambda secret: base64.b32encode(secret.encode()).decode(),
    **{
        f"base64 after {name}": lambda secret, name=name: base64.b64encode(f"{name}:{secret}:x".encode()).decode()
        for name in ("", "a", "ab", "abc")
    },
    "base64 for URLs": lambda secret: base64.urlsafe_b64encode(secret.encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("secret", ["pl4nted/value+é~?", "-----BEGIN X-----\nplantedLine0123456+/=\n-----END X-----"])
def test_values_of_the_environment_are_found_in_other_encodings(
    monkeypatch: pytest.MonkeyPatch, secret: str, form: Callable[[str], str]
) -> None:
    monkeypatch.setenv("MY_SECRET_KEY", secret)
    encoded = form(secret)
    redacted = redact_text(f"see {encoded} there")
    assert REDACTED in redacted
    assert redacted.startswith("see ")
    assert redacted.endswith(" there")
    part = encoded[len(encoded) // 3 : len(encoded) // 3 + 8]
    assert part not in redacted


def test_a_line_of_a_private_key_is_redacted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOY_KEY", f"-----BEGIN PRIVATE KEY-----\n{A}\n{B}==\n-----END PRIVATE KEY-----\n")
    assert redact_text(f"[rank 1] {A}\n[rank 1] {B}==") == f"[rank 1] {REDACTED}\n[rank 1] {REDACTED}"


@pytest.mark.parametrize("name", ["HFTOKEN", "DB_PASS", "SSHPASS", "GITHUB_PAT", "SLACK_WEBHOOK_URL", "SENTRY_DSN"])
def test_more_names_of_secrets(name: str) -> None:
    assert collect_known_secrets({name: "s3cret-value"}) == ("s3cret-value",)


def test_the_password_of_a_proxy_or_database_is_a_secret() -> None:
    environment = {"https_proxy": "http://me:pr0xy-word@host:80", "DATABASE": "pg://u:d4tabase@h/x,pg://v:0ther-word@h"}
    assert set(collect_known_secrets(environment)) == {"0ther-word", "pr0xy-word", "d4tabase"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("https://h/a?token=", "&page=2"),
        ("https://h/a?page=2&api-key=", ""),
        ("https://h/a?X-Amz-Signature=", "#x"),
        ("Authorization: Basic ", ""),
        ("'authorization': 'Bearer ", "'"),
        ("password=", " was refused"),
        ("AccountName=n;AccountKey=", ";EndpointSuffix=x"),
        ("Cookie: session=", "; path=/"),
        ("https://discord.com/api/webhooks/", ""),
        ('{\\"client_secret\\": \\"', '\\"}'),
        ("https://hooks.slack.com/services/", ""),
    ],
)
def test_secrets_by_their_position(before: str, after: str) -> None:
    assert redact_text(f"{before}{A[:24]}{after}") == f"{before}{REDACTED}{after}"


def test_words_and_the_working_directory_are_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"A_KEY": "disabled", "B_KEY": "short", "KEYS_DIR": str(tmp_path.parent), "C_KEY": " s3cret-value\n"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    text = f"disabled short {tmp_path.parent} s3cret-value"
    assert redact_text(text) == f"disabled short {tmp_path.parent} {REDACTED}"


def test_a_secret_that_is_set_or_deleted_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redact_text("uses first-value-9") == "uses first-value-9"
    monkeypatch.setenv("LATER_TOKEN", "first-value-9")
    assert redact_text("uses first-value-9") == f"uses {REDACTED}"
    monkeypatch.setitem(os.environb, b"LATER_TOKEN", b"other-value-9")
    assert redact_text("uses first-value-9, other-value-9") == f"uses first-value-9, {REDACTED}"
    monkeypatch.delenv("LATER_TOKEN")
    assert redact_text("uses other-value-9") == "uses other-value-9"


@pytest.mark.parametrize("text", ["mysql --password={} db", "Uid=u;Pwd={};x", "machine h login u password {} x"])
def test_short_passwords_by_their_position(text: str) -> None:
    assert redact_text(text.format("Hunter2x")) == text.format(REDACTED)
