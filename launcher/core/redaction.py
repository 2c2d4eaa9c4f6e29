"""Redaction of secrets from everything that a run writes or prints.

A secret is recognized by its key (token, password, api_key …), by its position before a URL's host, by the format of
well-known services, or as the value of such an environment variable.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

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
_USER_INFO = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.\-]{0,20}://)(?:[^\s@'\":/]{1,200}:[^\s'\"]{1,500}|[^\s/@'\"]{1,500})@", re.IGNORECASE
)
_KEY_FORMATS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|wandb_v1_[A-Za-z0-9_]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|sk-[A-Za-z0-9_\-]{20,}"  # OpenAI; Anthropic: sk-ant-
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
    r"|AIza[A-Za-z0-9_\-]{35}"  # Google
    r"|xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9\-]{10,}|xapp-[A-Za-z0-9\-]{10,}"  # Slack
    r"|gl(?:pat|ptt|dt|rt|cbt|ft|soat)-[A-Za-z0-9_.\-]{20,}"  # GitLab
    r"|npm_[A-Za-z0-9]{30,}"
    r"|eyJ[A-Za-z0-9_\-]{8,}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*)"  # a JSON Web Token
    r"|-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----(?:[^\"'<-]|-(?!----))*"
    r"(?:-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----)?"
)
_AWS_SECRET = re.compile(r"(?P<name>(?i:secret_?(?:access_?)?key)\W{1,10})[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORD = re.compile(r"[a-z_]{0,11}")  # an ordinary word of a setting, such as disabled


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name holds a secret."""
    return _NAME.search(name) is not None and _HARMLESS.search(name.rpartition(".")[2]) is None


def redact_text(text: str, known: tuple[str, ...] = ()) -> str:
    """Redact what looks like a secret, and known values."""
    for value in known:
        text = text.replace(value, REDACTED)
    text = _AWS_SECRET.sub(rf"\g<name>{REDACTED}", _USER_INFO.sub(rf"\g<scheme>{REDACTED}@", text))
    return _KEY_FORMATS.sub(REDACTED, text)


def redact_file(path: Path, text: str) -> str:
    """Redact the text of a file, including the secrets of the environment. Of a JSON file, only strings can change."""
    known = collect_known_secrets(os.environ)
    if path.suffix not in (".json", ".jsonl"):
        return redact_text(text, known)

    def redact_string(match: re.Match[str]) -> str:
        literal = match.group()
        try:
            content = json.loads(literal)
        except ValueError:
            return literal
        redacted = redact_text(content, known)
        return literal if redacted == content else json.dumps(redacted, ensure_ascii=False)

    return _JSON_STRING.sub(redact_string, text)


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
    values = {value.strip() for name, value in environment.items() if is_secret_name(name) and name not in _SHELL}
    return tuple(sorted((value for value in values if not _is_ordinary(value)), key=len, reverse=True))


def _is_ordinary(value: str) -> bool:
    """Return whether a value may be part of any file: short, a word, or part of the working directory's path."""
    if len(value) < _MIN_LENGTH or _WORD.fullmatch(value):
        return True
    with suppress(OSError):  # the working directory was deleted
        return value in str(Path.cwd())
    return False
