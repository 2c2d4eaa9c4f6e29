"""Values of command-line flags: parsers for argparse's `type`, each with a message that names a valid example."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from launcher.core.run_paths import expand_home
from launcher.core.units import GIB, MIB

_MAX_NUMBER = 10**9
_MAX_PRICE = 1e6
_MAX_PORT = 65535
_MAX_PROFILED_STEPS = 50
_TIME_LIMIT = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)")
# What sbatch accepts as a partition or an account, and nothing that could end a line of its script.
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._:/-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})")
_VOLUME = re.compile(r"([a-z0-9]+:/)?[/A-Za-z0-9][A-Za-z0-9._/-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SLURM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,@+-]*")
_CURRENCIES = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY"}
_CURRENCY = r"([$€£¥]|[a-z]{3})?\s*"
_AMOUNT = r"(\d+(?:\.\d+)?|\.\d+)\s*"
_UNIT = r"(?:(?:/|\bper\b)\s*(gpu|node))?\s*(?:[-/ ]\s*h(?:ou)?r?)?"
_PRICE = re.compile(_CURRENCY + _AMOUNT + _CURRENCY + _UNIT, re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|g|mib|m|gb|mb)?")
_SIZE_UNITS = {"gib": GIB, "g": GIB, "mib": MIB, "m": MIB, "gb": 1e9, "mb": 1e6}


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Host and port of the rendezvous."""

    host: str
    port: int


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    return _parse_int(text, 1)


def non_negative_int(text: str) -> int:
    """Parse an integer of at least 0."""
    return _parse_int(text, 0)


def _parse_int(text: str, lowest: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = lowest - 1
    if number < lowest:
        raise argparse.ArgumentTypeError(f"{_quote(text)} is not an integer of at least {lowest}")
    if number > _MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{_quote(text)} is more than {_MAX_NUMBER:,}")
    return number


def step_range(text: str) -> tuple[int, int]:
    """Parse A:B, first and last step."""
    first, colon, last = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{_quote(text)} is not A:B, such as 10:15")
    steps = positive_int(first), positive_int(last)
    if steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(f"{_quote(text)}: step {steps[0]} comes after step {steps[1]}")
    if steps[1] - steps[0] >= _MAX_PROFILED_STEPS:
        raise argparse.ArgumentTypeError(
            f"{_quote(text)}: a trace of more than {_MAX_PROFILED_STEPS} steps is too large to open"
        )
    return steps


def vram_mib(text: str) -> int:
    """Parse a size in MiB: 24GiB, 24GB, 24G, 24576MiB, or 24 (GiB)."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{_quote(text)} is not a size, such as 24GiB")
    mib = int(float(match[1]) * _SIZE_UNITS[match[2] or "gib"] / MIB)
    if not 1 <= mib <= _MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{_quote(text)} is not a possible size of GPU memory, such as 24GiB")
    return mib


def gib(text: str) -> float:
    """Parse a positive number of GiB."""
    return positive_number(text, " of GiB")


def positive_number(text: str, unit: str = "") -> float:
    """Parse a positive, finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{_quote(text)} is not a positive number{unit}")
    return number


class Price(NamedTuple):
    """Price of one hour of a GPU, or of a node."""

    amount: float
    currency: str  # ISO 4217; empty: not given
    is_node: bool


def price_per_hour(text: str) -> Price:
    """Parse a price of a GPU-hour or node-hour: 0.40, 1.90EUR, $24/node, 0.40/h."""
    match = _PRICE.fullmatch(text.strip())
    if match is None or float(match[2]) > _MAX_PRICE or (match[1] and match[3]):
        raise argparse.ArgumentTypeError(
            f"{_quote(text)} is not a price per hour, such as 0.40 (per GPU), 1.90EUR or '$24/node'"
        )
    currency = (match[1] or match[3] or "").upper()
    return Price(float(match[2]), _CURRENCIES.get(currency, currency), (match[4] or "").lower() == "node")


def percentage(text: str) -> float:
    """Parse a percentage as a fraction: 5% is 0.05."""
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{_quote(text)} is not a percentage, such as 5%")
    return value


def base_model(text: str) -> str:
    """Return the name or the folder of a base model; refuse an empty one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name of the base model is empty")
    return expand_home(text)


def address(text: str) -> Address:
    """Parse HOST:PORT; an IPv6 address is in brackets."""
    host, colon, port = text.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", " ")
    if not colon or not host or not port.isdecimal() or not host.isprintable() or re.search(r"[\s'\"$`\\/]", host):
        raise argparse.ArgumentTypeError(f"{_quote(text)} is not HOST:PORT, such as node0:29500 or [fd00::1]:29500")
    if not 1 <= int(port) <= _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{_quote(text)}: a port is a number from 1 to {_MAX_PORT}")
    return Address(host=host, port=int(port))


def time_limit(text: str) -> int:
    """Parse Slurm's HH:MM:SS or D-HH:MM:SS as seconds."""
    match = _TIME_LIMIT.fullmatch(text.strip())
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise argparse.ArgumentTypeError(f"{_quote(text)} is not a time limit, such as 12:00:00 or 2-00:00:00")
    return total


def slurm_name(text: str) -> str:
    """Check a Slurm partition or account."""
    if not _SLURM_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{_quote(text)} is not a valid Slurm name, such as gpu-a100")
    return text


def image(text: str) -> str:
    """Check a container image. It needs a tag: the image must be the same when a preempted run resumes."""
    if not _IMAGE.fullmatch(text) or text.endswith(":latest"):
        raise argparse.ArgumentTypeError(
            f"{_quote(text)} is not an image with a tag (other than latest) or digest, such as ghcr.io/me/launcher:1.0"
        )
    return text


def volume(text: str) -> str:
    """Check a volume's name, a bucket's URL or a path."""
    if not _VOLUME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{_quote(text)} is not the name of a volume, the URL of a bucket or a path, such as data, s3://my or /data"
        )
    return text


def variable_names(text: str) -> list[str]:
    """Parse names of environment variables separated by commas; a name given twice counts once."""
    names = list(dict.fromkeys(word_list(text)))
    for name in names:
        if not _VARIABLE.fullmatch(name):  # not quoted: it may contain the secret
            raise argparse.ArgumentTypeError(
                "give only the names of variables, separated by commas; their values belong in the platform's store"
            )
    return names


def word_list(text: str) -> list[str]:
    """Parse words separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{_quote(text)} is not a comma-separated list of words, such as a,b")
    return words


def artifact_list(text: str) -> list[str]:
    """Parse which W&B artifacts to upload."""
    words = word_list(text)
    for word in words:
        if word not in ("adapter", "manifest"):
            raise argparse.ArgumentTypeError(f"{_quote(word)} is neither adapter nor manifest")
    return words


def tracker_list(text: str) -> list[str]:
    """Parse the trackers that metrics are logged to."""
    words = [] if text == "none" else word_list(text)
    if "none" in words:
        raise argparse.ArgumentTypeError("none excludes other trackers")
    for word in words:
        if word not in ("wandb", "tensorboard", "mlflow"):
            raise argparse.ArgumentTypeError(f"{_quote(word)} is not one of wandb, tensorboard, mlflow, none")
    return words


def _quote(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
