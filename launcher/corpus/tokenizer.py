"""The tokenizer of a base model, loaded from its files without torch and transformers."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from launcher.base_models.catalogue import TINY_BASE_FOLDER, TINY_BASE_NAME, find_config
from launcher.base_models.missing_files import describe_download_error
from launcher.core.errors import InputError, first_line
from launcher.plan.model import Plan

_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
_TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
_FILES = ("tokenizer.json", "special_tokens_map.json", *_TEMPLATE_FILES, _TOOL_TEMPLATE)
_COPIED = (
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, kw_only=True)
class BaseTokenizer:
    """A fast tokenizer, its settings and its chat template."""

    folder: Path
    new_tokens: tuple[str, ...] = ()  # added to those of the folder

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer, without padding, truncation and post-processor."""
        return self._loaded[0]

    @property
    def bos_ids(self) -> list[int]:
        """Ids of the tokens that the tokenizer's post-processor puts before a text, usually BOS."""
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[Tokenizer, list[int]]:
        return _load_once(self.folder, self.new_tokens, tuple(_get_version(self.folder / name) for name in _FILES))

    def load(self) -> tuple[Tokenizer, list[int]]:
        """Read the tokenizer; return it and its BOS tokens."""
        file = self.folder / "tokenizer.json"
        try:
            backend = Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises plain Exception
            raise InputError(f"{file}: not a valid tokenizer: {str(error)[:200]}") from None
        backend.no_padding()
        backend.no_truncation()
        self._add_configured_tokens(backend)
        self._add_new_tokens(backend)
        bos_ids = _find_bos_ids(backend)
        backend.post_processor = processors.ByteLevel(trim_offsets=False)  # changes no token and no offset
        return backend, bos_ids

    def _add_configured_tokens(self, backend: Tokenizer) -> None:
        """Add the tokens that tokenizer_config.json declares, but tokenizer.json does not, as transformers does."""
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        declared = self.settings.get("added_tokens_decoder")
        for entry in declared.values() if isinstance(declared, dict) else ():
            name = entry.get("content") if isinstance(entry, dict) else None
            if isinstance(name, str) and name not in known and backend.token_to_id(name) is not None:
                flags = {key: bool(entry.get(key)) for key in _TOKEN_FLAGS}
                backend.add_tokens([AddedToken(name, **flags)])
                known.add(name)
        names = [name for key in _SPECIAL_NAMES if isinstance(name := self.special_token(key), str)]
        backend.add_special_tokens([n for n in names if n not in known and backend.token_to_id(n) is not None])

    def _add_new_tokens(self, backend: Tokenizer) -> None:
        known = [name for name in self.new_tokens if backend.token_to_id(name) is not None]
        if known:
            raise InputError(
                f"training.config.new_tokens: {', '.join(map(repr, known))} are already tokens of {self.folder}",
                hint="remove them from the list: rows can already use them",
            )
        backend.add_tokens(list(self.new_tokens))

    @property
    def new_token_ids(self) -> list[int]:
        """The ids of the new tokens."""
        ids = (self.backend.token_to_id(name) for name in self.new_tokens)
        return [number for number in ids if number is not None]

    def write_files(self, folder: Path) -> None:
        """Write the tokenizer for transformers: the base's files, and the new tokens."""
        for file in (file for pattern in _COPIED for file in self.folder.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
        if (self.folder / _TOOL_TEMPLATE).is_file():
            (folder / _TOOL_TEMPLATE).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.folder / _TOOL_TEMPLATE, folder / _TOOL_TEMPLATE)
        if self.new_tokens:
            backend = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
            backend.add_tokens(list(self.new_tokens))
            backend.save(str(folder / "tokenizer.json"))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Content of tokenizer_config.json."""
        return self.load_json("tokenizer_config.json")

    def load_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file of the base; empty if there is none."""
        file = self.folder / name
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
        return None if self.chat_template_file is None else self._load_template(self.chat_template_file)

    @cached_property
    def chat_template_file(self) -> str | None:
        """Name of the file that contains the chat template; None if there is none."""
        return next((name for name in _TEMPLATE_FILES if self._load_template(name)), None)

    @cached_property
    def tool_template(self) -> str | None:
        """The template named tool_use, which transformers uses for rows with tools; None if there is none."""
        name = self.chat_template_file
        return None if name is None else self._load_template(_TOOL_TEMPLATE) or self._load_template(name, "tool_use")

    def _load_template(self, name: str, title: str = "default") -> str | None:
        if name.endswith(".jinja"):
            file = self.folder / name
            if not file.is_file() or (title != "default"):
                return None
            try:
                return file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start:,}") from None
        template = self.load_json(name).get("chat_template")
        if isinstance(template, list):  # several named ones
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get(title)
        elif title != "default":
            return None
        return template if isinstance(template, str) else None

    @property
    def start_of_text(self) -> str:
        """Text that the tokenizer's post-processor puts before a text, usually BOS."""
        return "".join(self.backend.id_to_token(token) or "" for token in self.bos_ids)

    @property
    def end_of_text(self) -> str | None:
        """The tokenizer's eos_token; None if it is not set."""
        return self.special_token("eos_token")

    def special_token(self, name: str) -> str | None:
        """Return a special token such as `bos_token`; None if it is not set."""
        token = self.settings.get(name) or self._special_tokens_map.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    @cached_property
    def _special_tokens_map(self) -> dict[str, Any]:
        return self.load_json("special_tokens_map.json")

    @property
    def extra_tokens(self) -> dict[str, str]:
        """Special tokens that only this model has, by name, such as `image_token` (`extra_special_tokens`)."""
        extra = self.settings.get("extra_special_tokens")
        return {k: v for k, v in extra.items() if isinstance(v, str)} if isinstance(extra, dict) else {}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the tokenizer's files."""
        digest = hashlib.sha256()
        for name in _FILES:
            file = self.folder / name
            digest.update(f"{name}\0".encode())
            digest.update(file.read_bytes() if file.is_file() else b"")
            digest.update(b"\0")
        if self.new_tokens:
            digest.update(json.dumps(self.new_tokens).encode())
        return digest.hexdigest()


@lru_cache(maxsize=2)  # the plan and the preparation load the same one, and a large one takes half a second
def _load_once(
    folder: Path,
    new_tokens: tuple[str, ...],
    versions: tuple[tuple[int, int] | None, ...],  # noqa: ARG001  (part of the cache's key)
) -> tuple[Tokenizer, list[int]]:
    """Load a tokenizer, or return the one loaded before if the versions of its files are unchanged."""
    return BaseTokenizer(folder=folder, new_tokens=new_tokens).load()


def _get_version(file: Path) -> tuple[int, int] | None:
    """Return the modification time and size of a file; None if it does not exist."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _find_bos_ids(backend: Tokenizer) -> list[int]:
    plain = backend.encode("a", add_special_tokens=False).ids
    processed: list[int] = backend.encode("a", add_special_tokens=True).ids
    starts = range(len(processed) - len(plain) + 1)
    return processed[: next((start for start in starts if processed[start : start + len(plain)] == plain), 0)]


def load_tokenizer(base: str, search: tuple[Path, ...], *, allow_tiny_fallback: bool = False) -> BaseTokenizer:
    """Load the tokenizer of a base model from the package (tiny base), a local folder, the hub's cache or the hub.

    With `allow_tiny_fallback`, the tokenizer of the tiny base is used instead of a download, for previews and for runs
    with random weights.
    """
    found = find_tokenizer(base, search)
    if found is not None:
        return found
    if allow_tiny_fallback:
        return BaseTokenizer(folder=TINY_BASE_FOLDER)
    return BaseTokenizer(folder=_download(base, find_config(base, search)))


def find_tokenizer(base: str, search: tuple[Path, ...]) -> BaseTokenizer | None:
    """Return the tokenizer of a base model if it is on this machine, otherwise None."""
    if base == TINY_BASE_NAME:
        return BaseTokenizer(folder=TINY_BASE_FOLDER)
    config = find_config(base, search)
    is_here = config is not None and (config.parent / "tokenizer.json").is_file()
    return BaseTokenizer(folder=config.parent) if config is not None and is_here else None


def load_planned_tokenizer(plan: Plan, search: tuple[Path, ...]) -> BaseTokenizer:
    """Load the tokenizer of a plan's base, with its new tokens, except those that the tiny base already has."""
    tokenizer = load_tokenizer(plan.base.name, search, allow_tiny_fallback=plan.random_weights)
    new = plan.data.new_tokens
    if tokenizer.folder == TINY_BASE_FOLDER:
        new = tuple(token for token in new if tokenizer.backend.token_to_id(token) is None)
    return replace(tokenizer, new_tokens=new)


def _download(base: str, config: Path | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = ["tokenizer*", "*.jinja", "chat_template.json", "special_tokens_map.json", "*config.json"]
        return Path(snapshot_download(base, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises whatever its network layer raises
        where = (
            f"{config.parent} has no tokenizer.json" if config is not None else "no local folder of that name was found"
        )
        why, way_out = describe_download_error(base, error)
        raise InputError(
            f"the tokenizer of {base} is not on this machine ({where}), and {why}",
            hint=f"{way_out}; or set base_models[0].name or LAUNCHER_MODELS_DIR to a folder with tokenizer.json; "
            f"the Hub's client reports: {first_line(error)}",
        ) from None
