"""The tokenizer of a base model, loaded from its files without torch and transformers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from launcher.base_models.catalogue import TINY_BASE_FOLDER, TINY_BASE_NAME, find_config
from launcher.core.errors import InputError, first_line

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True, kw_only=True)
class BaseTokenizer:
    """A fast tokenizer, its settings and its chat template."""

    folder: Path

    @cached_property
    def backend(self) -> Tokenizer:
        """The tokenizer, without padding and truncation."""
        file = self.folder / "tokenizer.json"
        try:
            backend = Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises plain Exception
            raise InputError(f"{file}: not a valid tokenizer: {str(error)[:200]}") from None
        backend.no_padding()
        backend.no_truncation()
        return backend

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Content of tokenizer_config.json."""
        file = self.folder / "tokenizer_config.json"
        if not file.is_file():
            return {}
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{file}: broken JSON: {error}") from None
        if not isinstance(settings, dict):
            raise InputError(f"{file}: not a JSON object")
        return settings

    @property
    def chat_template(self) -> str | None:
        """The chat template; None if there is none."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self.settings.get("chat_template")
        if isinstance(template, list):  # several named ones
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        return template if isinstance(template, str) else None

    @property
    def end_of_text(self) -> str | None:
        """The end-of-text token."""
        return self.special_token("eos_token")

    def special_token(self, name: str) -> str | None:
        """Return a special token such as `bos_token`; None if it is not set."""
        token = self.settings.get(name)
        return token.get("content") if isinstance(token, dict) else token

    def is_one_token(self, text: str) -> bool:
        """Return whether a text is a token of the vocabulary."""
        return self.backend.token_to_id(text) is not None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the tokenizer's files."""
        digest = hashlib.sha256()
        for name in _FILES:
            file = self.folder / name
            digest.update(f"{name}\0".encode())
            digest.update(file.read_bytes() if file.is_file() else b"")
            digest.update(b"\0")
        return digest.hexdigest()


def load_tokenizer(base: str, search: tuple[Path, ...], *, allow_tiny_fallback: bool = False) -> BaseTokenizer:
    """Load the tokenizer of a base model: the embedded one, a local folder, the hub's cache or the hub.

    `allow_tiny_fallback` uses the embedded one instead of downloading, if weights are random and only speed matters.
    """
    if base == TINY_BASE_NAME:
        return BaseTokenizer(folder=TINY_BASE_FOLDER)
    config = find_config(base, search)
    if config is not None and (config.parent / "tokenizer.json").is_file():
        return BaseTokenizer(folder=config.parent)
    if allow_tiny_fallback:
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
            f"the tokenizer of {base} is not on this machine ({where}), and the hub cannot be reached",
            hint="set base_models[0].name or LAUNCHER_MODELS_DIR to a folder with tokenizer.json, or prepare on a "
            f"machine with network access; the hub client reports: {first_line(error)}",
        ) from None
