"""The base's tokenizer, straight from its files: Rust-side, without torch and without transformers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from launcher.bases import TINY_BASE_FOLDER, TINY_BASE_NAME, find_config
from launcher.errors import InputError, first_line

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True, kw_only=True)
class BaseTokenizer:
    """A fast tokenizer, its settings and its chat template."""

    folder: Path

    @cached_property
    def backend(self) -> Tokenizer:
        file = self.folder / "tokenizer.json"
        try:
            backend = Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises plain Exception
            raise InputError(f"{file}: not a tokenizer: {str(error)[:200]}") from None
        backend.no_padding()
        backend.no_truncation()
        return backend

    @cached_property
    def settings(self) -> dict[str, Any]:
        file = self.folder / "tokenizer_config.json"
        if not file.is_file():
            return {}
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{file}: broken JSON: {error}") from None
        if not isinstance(settings, dict):
            raise InputError(f"{file}: holds no object with settings")
        return settings

    @property
    def chat_template(self) -> str | None:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self.settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        return template if isinstance(template, str) else None

    @property
    def end_of_text(self) -> str | None:
        return self.special_token("eos_token")

    def special_token(self, name: str) -> str | None:
        token = self.settings.get(name)
        return token.get("content") if isinstance(token, dict) else token

    def is_one_token(self, text: str) -> bool:
        return self.backend.token_to_id(text) is not None

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in _FILES:
            file = self.folder / name
            digest.update(f"{name}\0".encode())
            digest.update(file.read_bytes() if file.is_file() else b"")
            digest.update(b"\0")
        return digest.hexdigest()


def load_tokenizer(base: str, search: tuple[Path, ...], *, any_will_do: bool = False) -> BaseTokenizer:
    """Of a base by name: the embedded one, a local folder, the hub's cache on disk, or the hub.

    `any_will_do`, where weights are random and only speed is measured: the embedded one instead of the hub.
    """
    if base == TINY_BASE_NAME:
        return BaseTokenizer(folder=TINY_BASE_FOLDER)
    config = find_config(base, search)
    if config is not None and (config.parent / "tokenizer.json").is_file():
        return BaseTokenizer(folder=config.parent)
    if any_will_do:
        return BaseTokenizer(folder=TINY_BASE_FOLDER)
    return BaseTokenizer(folder=_download(base, config))


def _download(base: str, config: Path | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(base, allow_patterns=["tokenizer*", "*.jinja", "special_tokens_map.json"]))
    except Exception as error:  # the hub's client raises whatever its network layer raises
        where = (
            f"{config.parent} has no tokenizer.json" if config is not None else "no local folder of that name was found"
        )
        raise InputError(
            f"{base}: its tokenizer is not on this machine ({where}), and the hub cannot be reached",
            hint="point base_models[0].name or LAUNCHER_MODELS_DIR to a folder with tokenizer.json, or prepare where "
            f"there is a network; the hub's client says: {first_line(error)}",
        ) from None
