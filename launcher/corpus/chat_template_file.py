"""Load the chat template file that a manifest names."""

from __future__ import annotations

from pathlib import Path

from launcher.core.errors import InputError

_KEY = "base_models[0].chat_template"
_MAX_BYTES = 1_000_000


def load_chat_template(folder: Path, name: str) -> str:
    """Return the source of a template in the manifest's folder; raises InputError if it cannot be used."""
    file = folder / name
    try:
        if Path(name).name != name or not file.resolve().is_relative_to(folder.resolve()):
            raise InputError(f"{_KEY}: {name} is not a file next to the manifest", hint=f"copy it to {folder}")
        if not file.is_file():
            raise InputError(f"{_KEY}: {file}: no such file", hint="the path is relative to the manifest")
        if file.stat().st_size > _MAX_BYTES:
            raise InputError(f"{_KEY}: {file} is too large to be a chat template (more than 1 MB)")
        source = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise InputError(f"{_KEY}: {file} cannot be read: {error}") from None
    try:
        from launcher.corpus.chat_template import check_own_template
    except ImportError:  # without the extra `data`, nothing can be rendered here
        return source
    check_own_template(source, str(file))
    return source
