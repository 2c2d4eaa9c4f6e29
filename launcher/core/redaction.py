"""Redaction of secrets from everything that a run writes or prints.

A secret is recognized by its key (token, password, api_key …), by its position before a URL's host, by the format of
well-known services, or as the value of such an environment variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "***"
_MIN_LENGTH = 8  # of a value that is searched everywhere: a shorter one may be an ordinary word

_NAME = re.compile(
    r"(^|[_.\-]|(?<=[a-z])(?=[A-Z]))(?i:auth)?_?(?i:token|secret|credential|api_?key|access_?key|private_?key|auth|key)s?"
    r"($|[_.\-])|(?i:password|passwd|passphrase|pwd)",
)
_SHELL = ("PWD", "OLDPWD")  # working directories, not passwords
# Settings that only look like one.
_HARMLESS = re.compile(
    r"^(max|num|min|pad|eos|bos|special|trained|per|of|mean|primary|foreign|sort)_?(new_?)?(tokens?|keys?)$"
    r"|^tokens?_(per_row|ids?|type)$|^keys?$",
    re.IGNORECASE,
)
_USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.\-]*://)(?:[^\s@'\":/]+:[^\s'\"]+|[^\s/@'\"]+)@", re.IGNORECASE)
_KEY_FORMATS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|wandb_v1_[A-Za-z0-9_]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_\-]{20,})"
)


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name holds a secret."""
    return _NAME.search(name) is not None and _HARMLESS.search(name.rpartition(".")[2]) is None


def redact_text(text: str, known: tuple[str, ...] = ()) -> str:
    """Redact what looks like a secret, and known values."""
    for value in known:
        text = text.replace(value, REDACTED)
    return _KEY_FORMATS.sub(REDACTED, _USER_INFO.sub(rf"\g<scheme>{REDACTED}@", text))


def redact_tree(value: object, name: str = "", known: tuple[str, ...] = ()) -> object:
    """Redact a JSON tree: values of secret keys, and what looks like a secret elsewhere."""
    if isinstance(value, dict):
        return {key: redact_tree(below, str(key), known) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(below, name, known) for below in value]
    if isinstance(value, str):
        return REDACTED if value and is_secret_name(name) else redact_text(value, known)
    return value


def collect_known_secrets(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secrets in environment variables, longest first, so that one containing another is redacted fully."""
    values = {
        value
        for name, value in environment.items()
        if is_secret_name(name) and name not in _SHELL and len(value) >= _MIN_LENGTH
    }
    return tuple(sorted(values, key=len, reverse=True))
