"""Tokenizer files are found, validated and fingerprinted."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.corpus.tokenizer import BaseTokenizer, load_tokenizer
from tests.unit.corpus.inputs import CHAT_TEMPLATE, write_base


def test_a_folder_is_a_base(base: Path) -> None:
    tokenizer = load_tokenizer(str(base), ())
    assert tokenizer.folder == base
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.end_of_text == "<|im_end|>"
    assert tokenizer.backend.token_to_id("<|im_end|>") is not None
    assert tokenizer.backend.token_to_id("<|nothing|>") is None


def test_a_base_is_found_by_name(base: Path) -> None:
    assert load_tokenizer(f"someone/{base.name}", (base.parent,)).folder == base


def test_chat_template_may_be_in_a_separate_file(tmp_path: Path) -> None:
    folder = write_base(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert BaseTokenizer(folder=folder).chat_template == "{{ messages }}"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    folder = write_base(tmp_path, settings={"chat_template": several})
    assert BaseTokenizer(folder=folder).chat_template == "y"


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    folder = write_base(tmp_path, settings={"eos_token": {"content": "<|eot_id|>", "lstrip": False}})
    assert BaseTokenizer(folder=folder).end_of_text == "<|eot_id|>"


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    folder = write_base(tmp_path)
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    assert len(BaseTokenizer(folder=folder).backend.encode("one two three four five").ids) > 2


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_every_file_is_in_the_fingerprint(tmp_path: Path, name: str) -> None:
    folder = write_base(tmp_path)
    before = BaseTokenizer(folder=folder).fingerprint
    assert before == BaseTokenizer(folder=folder).fingerprint
    file = folder / name
    file.write_text((file.read_text() if file.exists() else "") + " ")
    assert BaseTokenizer(folder=folder).fingerprint != before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "not a valid tokenizer"),
        ("tokenizer_config.json", "{", "broken JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = write_base(tmp_path)
    (folder / name).write_text(content)
    tokenizer = BaseTokenizer(folder=folder)
    with pytest.raises(InputError, match=f"{name}: {message}"):
        _ = tokenizer.backend.encode(tokenizer.end_of_text or "")


def test_missing_tokenizer_is_an_error_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"has no tokenizer\.json") as caught:
        load_tokenizer(str(tmp_path), ())
    assert "LAUNCHER_MODELS_DIR" in caught.value.hint
    with pytest.raises(InputError, match="no local folder of that name was found"):
        load_tokenizer("no-such-user/no-such-model", ())


def test_new_tokens_are_added_written_and_in_the_fingerprint(base: Path, tmp_path: Path) -> None:
    plain, added = (BaseTokenizer(folder=base, new_tokens=tokens) for tokens in ((), ("<node>", "<edge>")))
    size = plain.backend.get_vocab_size()
    assert added.new_token_ids == [size, size + 1]
    assert added.backend.encode("a <node>b", add_special_tokens=False).ids.count(size) == 1
    assert (
        len({plain.fingerprint, added.fingerprint, BaseTokenizer(folder=base, new_tokens=("<node>",)).fingerprint}) == 3
    )
    added.write_files(tmp_path)
    written = BaseTokenizer(folder=tmp_path)
    assert [written.backend.token_to_id(name) for name in added.new_tokens] == added.new_token_ids
    assert written.chat_template == added.chat_template


def test_new_tokens_that_exist_are_refused(base: Path) -> None:
    with pytest.raises(InputError, match=r"'<\|im_end\|>' are already tokens of "):
        _ = BaseTokenizer(folder=base, new_tokens=("<|im_end|>",)).backend


@pytest.mark.parametrize(
    ("code", "why", "way_out"),
    [
        (
            "GatedRepo",
            "it is gated: its conditions must be accepted",
            "accept them on the page of org/name, then `hf",
        ),
        (
            "RepoNotFound",
            "the Hub has no such public model",
            "check the spelling of org/name; for a private",
        ),
        ("RevisionNotFound", "the Hub has no such revision of it", "check base_models[0].revision"),
        ("", "the Hub cannot be reached", "check the network"),
        ("offline", "HF_HUB_OFFLINE forbids downloads", "unset HF_HUB_OFFLINE"),
    ],
)
def test_download_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, code: str, why: str, way_out: str) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if "Not" in code else 403)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port if code else 9}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", code == "offline")
        with pytest.raises(InputError) as caught:
            load_tokenizer("org/name", ())
        server.shutdown()
    assert caught.value.title.endswith(f"and {why}")
    assert caught.value.hint.startswith(way_out)
