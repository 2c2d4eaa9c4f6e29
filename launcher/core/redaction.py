"""Redaction of secrets from everything that a run writes or prints.

A secret is recognized by its key (token, password, api_key …), by its position in a URL or a header, by the format of
well-known services, or as the value of an environment variable whose name is that of a secret, also encoded.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, quote_plus

REDACTED = "***"
_MIN_LENGTH = 8  # of a value that is searched everywhere: a shorter one may be an ordinary word

_NAME = re.compile(
    r"(^|[_.\-]|(?<=[a-z])(?=[A-Z]))(?i:auth)?_?(?i:token|secret|credential|api_?key|access_?key|private_?key|auth|key)s?"
    r"($|[_.\-])|(?i:password|passwd|passphrase|pwd|connection_?string|webhook)|(?:TOKEN|SECRET|APIKEY)S?$"
    r"|(^|[_.\-])(?i:pass|pat|dsn|jwt|cookie)$|^SSHPASS$",
)
# The dictionary of os.environ, which would encode each name and decode each value at every call.
_VARIABLES: Mapping[bytes, bytes] = vars(os.environb).get("_data", os.environb)
_SHELL = ("PWD", "OLDPWD")  # working directories, not passwords
# Settings that only look like one.
_HARMLESS = re.compile(
    r"^(max|num|min|pad|eos|bos|end|special|trained|per|of|mean|primary|foreign|sort)_?(new_?)?(tokens?|keys?)$"
    r"|^tokens?_(per_row|ids?|type)$|^new_tokens$|^keys?$",
    re.IGNORECASE,
)
_USER_INFO = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.\-]{0,20}://)(?:[^\s@'\":/]{1,200}:[^\s'\"]{1,500}|[^\s/@'\"]{1,500})@", re.IGNORECASE
)
_PASSWORD = re.compile(r"://[^\s:/@]{0,200}:(?P<password>[^\s/@]{1,500})@")
_KEY_FORMATS = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2}))(?:hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|wandb_v1_[A-Za-z0-9_]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|sk-[A-Za-z0-9_\-]{20,}"  # OpenAI; Anthropic: sk-ant-
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
    r"|AIza[A-Za-z0-9_\-]{35}|ya29\.[A-Za-z0-9_\-]{20,}|GOCSPX-[A-Za-z0-9_\-]{20,}"  # Google
    r"|xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9\-]{10,}|xapp-[A-Za-z0-9\-]{10,}"  # Slack
    r"|gl(?:pat|ptt|dt|rt|cbt|ft|soat)-[A-Za-z0-9_.\-]{20,}"  # GitLab
    r"|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_\-]{30,}|dckr_pat_[A-Za-z0-9_\-]{20,}"
    r"|SG\.[A-Za-z0-9_\-]{16,}\.[A-Za-z0-9_\-]{16,}|key-[a-z0-9]{32}\b|SK[0-9a-f]{32}\b"  # SendGrid, Mailgun, Twilio
    r"|[0-9]{8,10}:AA[A-Za-z0-9_\-]{30,}|AAAA[A-Za-z0-9_\-]{7}:[A-Za-z0-9_\-]{100,}"  # Telegram, Firebase
    r"|AGE-SECRET-KEY-1[A-Z0-9]{50,}|ATATT3[A-Za-z0-9_=\-]{20,}|NRAK-[A-Z0-9]{20,}"  # age, Atlassian, New Relic
    r"|dp\.(?:pt|st|ct|sa|scim)\.[A-Za-z0-9._\-]{20,}|[A-Za-z0-9]{3}[0-9]Q~[A-Za-z0-9_~.\-]{31,34}"  # Doppler, Azure
    r"|(?:whsec_|pplx-|shp(?:at|ca|pa|ss)_|lin_api_|fig[do]_|tskey-[a-z]{1,10}-|glsa_|sntry[su]_|rpa_|tgp_v1_"
    r"|lsv2_(?:pt|sk)_|api_org_|secret_(?=[A-Za-z0-9]{40}))(?=[A-Za-z_\-]{0,40}[0-9])[A-Za-z0-9_\-]{20,}"
    r"|(?:nvapi-|gsk_|r8_|xai-|dapi|hvs\.|dop_v1_|[sr]k_live_)[A-Za-z0-9_\-]{20,}"  # NVIDIA, Groq, Replicate, xAI, ...
    r"|eyJ[A-Za-z0-9_\-]{8,}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*)"  # a JSON Web Token
    r"|-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----(?:[^\"'<-]|-(?!----))*"
    r"(?:-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----)?"
)
_ASSIGNED = re.compile(  # a long value with a digit and a letter
    r"(?P<name>(?i:password|passwd|account_?key|shared_?access_?key|private_?key_?id|cookie: ?[\w.\-]{1,40}"
    r"|secret(?:_?access)?_?key|client_?secret|api[_-]?key|(?:access|auth)[_-]?token)\W{1,8}"
    r"|(?i:basic|bearer) )(?=[^\s0-9]{0,200}[0-9])(?=[^\sA-Za-z]{0,200}[A-Za-z])[A-Za-z0-9+/=._~\-]{16,}"
)
_PASSWORD_SET = re.compile(  # shorter than other secrets
    r"(?P<name>(?i:password|passwd|pwd)(?:\W{0,2}[=:][^\w/]{0,3}| ))(?!/)(?=[^\s0-9]{0,200}[0-9])"
    r"(?=[^\sA-Za-z]{0,200}[A-Za-z])[^\s\"'&;,<>{}\\]{7,}"
)
_WEBHOOK = re.compile(
    r"(?P<name>hooks\.slack\.com/[a-z]{1,20}/|discord(?:app)?\.com/api/webhooks/|webhook\.office\.com/[a-z0-9]{1,20}/)"
    r"[A-Za-z0-9/@_\-]{20,}"
)
_QUERY = re.compile(r"(?P<name>[?&][\w.\-]{1,60})=[^&\s'\"<>#]{8,}")
_SIGNATURES = ("sig", "signature", "x-amz-signature", "x-goog-signature", "x-amz-credential", "x-goog-credential")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORD = re.compile(r"[a-z_]{0,11}")  # an ordinary word of a setting, such as disabled


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name holds a secret."""
    return _NAME.search(name) is not None and _HARMLESS.search(name.rpartition(".")[2]) is None


def redact_text(text: str, known: tuple[str, ...] | None = None) -> str:
    """Redact what looks like a secret, and the `known` secrets: by default, those in environment variables."""
    for value in get_known_secrets() if known is None else known:
        text = text.replace(value, REDACTED)
    text = _USER_INFO.sub(rf"\g<scheme>{REDACTED}@", text)
    for pattern in (_ASSIGNED, _PASSWORD_SET, _WEBHOOK):
        text = pattern.sub(rf"\g<name>{REDACTED}", text)
    return _KEY_FORMATS.sub(REDACTED, _QUERY.sub(_redact_parameter, text))


def _redact_parameter(match: re.Match[str]) -> str:
    name = match["name"][1:]
    is_secret = is_secret_name(name.replace("-", "_")) or name.lower() in _SIGNATURES
    return f"{match['name']}={REDACTED}" if is_secret else match.group()


def redact_file(path: Path, text: str) -> str:
    """Redact secrets in the text of a file, also those in environment variables; in JSON, only strings change."""
    known = get_known_secrets()
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


def redact_tree(value: object, name: str = "", known: tuple[str, ...] | None = None) -> object:
    """Redact a JSON tree: values of secret keys, and what `redact_text` finds elsewhere."""
    known = get_known_secrets() if known is None else known
    if isinstance(value, dict):
        return {key: redact_tree(below, str(key), known) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(below, name, known) for below in value]
    if isinstance(value, str):
        return REDACTED if value and is_secret_name(name) else redact_text(value, known)
    return value


def get_known_secrets() -> tuple[str, ...]:
    """Return the secrets in this process's environment, as they are and encoded."""
    try:
        folder = os.getcwd()  # noqa: PTH109  (called for every line of output)
    except OSError:  # the working directory was deleted
        folder = ""
    return _collect_encoded(tuple(_VARIABLES.items()), folder)


@lru_cache(maxsize=4)
def _collect_encoded(environment: tuple[tuple[bytes, bytes], ...], folder: str) -> tuple[str, ...]:
    secrets = collect_known_secrets({os.fsdecode(name): os.fsdecode(value) for name, value in environment}, folder)
    return tuple(sorted({form for secret in secrets for form in _encode(secret)}, key=len, reverse=True))


def collect_known_secrets(environment: Mapping[str, str], folder: str = "") -> tuple[str, ...]:
    """Return the secrets in environment variables, longest first, so that one containing another is redacted fully.

    Parts of the path `folder` are not secrets.
    """
    values = {value.strip() for name, value in environment.items() if is_secret_name(name) and name not in _SHELL}
    values |= {match["password"] for value in environment.values() for match in _PASSWORD.finditer(value)}
    values |= {line for value in values for line in value.split() if "\n" in value and _is_code(line)}
    return tuple(sorted((value for value in values if not _is_ordinary(value, folder)), key=len, reverse=True))


def _encode(secret: str) -> Iterator[str]:
    """Yield a secret as it is, and as in URLs, in JSON or Python strings, in hexadecimal, base32, base64."""
    yield secret
    yield from (quote(secret, safe=""), quote_plus(secret))
    yield from (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1])
    data = secret.encode("utf-8", "surrogateescape")
    yield from (data.hex(), data.hex().upper(), base64.b32encode(data).decode().rstrip("="))
    yield from ("".join(f"%{byte:02{case}}" for byte in data) for case in "xX")
    yield "".join(f"\\u{ord(char):04x}" for char in secret)
    for num_before in range(3):  # bytes that are encoded together with it, such as a user's name
        text = base64.b64encode(bytes(num_before) + data).decode()
        text = text[(num_before * 8 + 5) // 6 : (num_before + len(data)) * 8 // 6]
        yield from (text, text.replace("+", "-").replace("/", "_"))


def _is_code(line: str) -> bool:
    """Return whether a line of a multi-line secret is also redacted on its own, such as a line of a private key."""
    return re.fullmatch(r"[A-Za-z0-9+/=_\-]{16,}", line) is not None


def _is_ordinary(value: str, folder: str) -> bool:
    """Return whether a value is too common to be redacted: short, a word, or part of the working directory's path."""
    return len(value) < _MIN_LENGTH or _WORD.fullmatch(value) is not None or value in folder
