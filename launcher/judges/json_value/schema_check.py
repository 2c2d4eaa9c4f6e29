"""JSON Schema validation by jsonschema-rs, which never downloads schemas.

Schemas are part of the data and not trusted. One with references can take exponential time, so a worker process
validates under a timeout.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from launcher.judges.json_value.compare import Json, load_json
from launcher.judges.worker import make_module_worker

if TYPE_CHECKING:
    from jsonschema_rs import FancyRegexOptions, RegexOptions, Validator

_SECONDS, _MEMORY_MIB = 5.0, 1024
_MAX_SCHEMA_CHARACTERS = 1_000_000
_MAX_PATTERN_BYTES = 10 * 2**20
# An object without any of these is not meant as a schema: everything would be valid.
_KEYWORDS = frozenset(
    {
        "$schema", "$ref", "$defs", "definitions", "type", "enum", "const", "properties", "required", "items",
        "prefixItems", "additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "not", "if", "pattern",
        "format", "minimum", "maximum", "multipleOf", "minItems", "maxItems", "uniqueItems", "contains", "minLength",
        "maxLength", "propertyNames",
    }
)  # fmt: skip


class UnusableSchemaError(Exception):
    """The schema is not valid, so no value can be checked against it."""


def find_checker() -> str | None:
    """Return name and version of the package jsonschema-rs; None if it is not installed."""
    return None if find_spec("jsonschema_rs") is None else f"jsonschema-rs {version('jsonschema-rs')}"


class SchemaChecker:
    """Validates JSON values against JSON Schemas in a worker process."""

    def __init__(self, *, seconds: float = _SECONDS) -> None:
        self._worker = make_module_worker(__name__, seconds=seconds, memory_mib=_MEMORY_MIB)

    def find_schema_violation(self, schema_text: str, value_text: str) -> str:
        """Return the first violation of a JSON Schema by a value; empty if the value is valid.

        Raises UnusableSchemaError, or WorkerError after a timeout.
        """
        fault, violation = json.loads(self._worker.request(json.dumps([schema_text, value_text])))
        if fault:
            raise UnusableSchemaError(fault)
        return str(violation)

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def serve() -> None:
    """Run the worker process: each input line has a JSON Schema and a value, each output line the verdict."""
    print("ready", flush=True)
    for line in sys.stdin:
        schema_text, value_text = json.loads(line)
        fault = violation = ""
        try:
            violation = _describe(_load_validator(schema_text), load_json(value_text))
        except UnusableSchemaError as error:
            fault = str(error)
        print(json.dumps([fault, violation]), flush=True)


@lru_cache(maxsize=4096)
def _load_validator(schema_text: str) -> Validator:
    """Compile a JSON Schema; its regular expressions run in linear time if possible, else with bounded backtracking."""
    import jsonschema_rs as rs

    schema = _read_schema(schema_text)
    try:
        return _compile(schema, rs.RegexOptions(size_limit=_MAX_PATTERN_BYTES))
    except UnusableSchemaError:
        return _compile(schema, rs.FancyRegexOptions(backtrack_limit=100_000, size_limit=_MAX_PATTERN_BYTES))


def _compile(schema: dict[str, Json], pattern_options: RegexOptions | FancyRegexOptions) -> Validator:
    """Compile a schema with format checks."""
    import jsonschema_rs as rs

    try:
        validator: Validator = rs.validator_for(
            schema, offline=True, validate_formats=True, pattern_options=pattern_options
        )
    except (ValueError, RecursionError, rs.ReferencingError) as error:
        raise UnusableSchemaError(str(error).partition("\n")[0][:200]) from None
    return validator


def _describe(validator: Validator, value: Json) -> str:
    if validator.is_valid(value):
        return ""
    error = next(iter(validator.iter_errors(value)))
    where = ".".join(map(str, error.instance_path))[:60]
    return f"{where + ': ' if where else ''}{error.message[:200]}"


def _read_schema(text: str) -> dict[str, Json]:
    if len(text) > _MAX_SCHEMA_CHARACTERS:
        raise UnusableSchemaError("the schema is too long")
    try:
        tree = load_json(text)
    except ValueError as error:
        raise UnusableSchemaError(f"the schema {error}") from None
    if not isinstance(tree, dict) or _KEYWORDS.isdisjoint(tree):
        raise UnusableSchemaError("it is not a JSON Schema")
    return tree
