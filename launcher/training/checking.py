"""A light look at an answer, for experts whose language has a checker here. So far that is JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NoReturn

from launcher.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    language: str
    is_valid: bool
    words: str


def check_answer(manifest: Manifest, text: str) -> Verdict | None:
    """None where there is no checker for what the expert writes."""
    decoding = manifest.training.decoding
    return _check_json(text) if decoding is not None and decoding.grammar_type == "json" else None


def _check_json(text: str) -> Verdict:
    try:
        json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        words = f"does not parse: {error.msg} at line {error.lineno}, column {error.colno}"
        return Verdict(language="json", is_valid=False, words=words)
    except (ValueError, RecursionError) as error:
        words = f"does not parse: {'it is nested too deeply' if isinstance(error, RecursionError) else error}"
        return Verdict(language="json", is_valid=False, words=words)
    return Verdict(language="json", is_valid=True, words="parses")


def _refuse(name: str) -> NoReturn:
    """Python reads NaN and Infinity; JSON has neither."""
    raise ValueError(f"{name} is not JSON")
