"""Secrets stay in the environment. What could be one is blotted out of everything that a run writes or shows.

Known by the name that it stands under (token, password, api_key …), by standing in front of a URL's host, or by the
form that services give their keys. The values of such environment variables are known, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

BLOT = "***"
_SHORTEST = 8  # of a value that is looked for everywhere: a shorter one might be any word

_NAME = re.compile(
    r"(^|[_.\-]|(?<=[a-z])(?=[A-Z]))(?i:auth)?_?(?i:token|secret|credential|api_?key|access_?key|private_?key|auth|key)s?"
    r"($|[_.\-])|(?i:password|passwd|passphrase|pwd)",
)
_SHELL = ("PWD", "OLDPWD")  # where a shell stands
# Settings that only sound like one.
_HARMLESS = re.compile(
    r"^(max|num|min|pad|eos|bos|special|trained|per|of|mean|primary|foreign|sort)_?(new_?)?(tokens?|keys?)$"
    r"|^tokens?_(per_row|ids?|type)$|^keys?$",
    re.IGNORECASE,
)
_USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.\-]*://)(?:[^\s@'\":/]+:[^\s'\"]+|[^\s/@'\"]+)@", re.IGNORECASE)
_FORMS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|wandb_v1_[A-Za-z0-9_]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_\-]{20,})"
)


def is_secret_name(name: str) -> bool:
    return _NAME.search(name) is not None and _HARMLESS.search(name.rpartition(".")[2]) is None


def redact_text(text: str, known: tuple[str, ...] = ()) -> str:
    """Whatever looks like a secret, wherever it stands, and values that are known to be one."""
    for value in known:
        text = text.replace(value, BLOT)
    return _FORMS.sub(BLOT, _USER_INFO.sub(rf"\g<scheme>{BLOT}@", text))


def redact_tree(value: object, name: str = "", known: tuple[str, ...] = ()) -> object:
    """Of a JSON tree: values under names that say so, and what looks like one elsewhere."""
    if isinstance(value, dict):
        return {key: redact_tree(below, str(key), known) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(below, name, known) for below in value]
    if isinstance(value, str):
        return BLOT if value and is_secret_name(name) else redact_text(value, known)
    return value


def find_known_secrets(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Longest first, so that one that holds another is gone as a whole."""
    values = {
        value
        for name, value in environment.items()
        if is_secret_name(name) and name not in _SHELL and len(value) >= _SHORTEST
    }
    return tuple(sorted(values, key=len, reverse=True))
