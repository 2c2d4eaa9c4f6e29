"""Building blocks of the manifest's types: strict and open objects, ignored keys, partly supported choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, JsonValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=10**12)]
# A key without effect: any JSON value, so that published manifests load. `ignored_keys.py` gives the reasons.
Ignored = JsonValue


def is_ignored(annotation: object) -> bool:
    """Return whether a field's type is that of a key without effect."""
    return annotation is Ignored


class Strict(BaseModel):
    """Object without unknown keys. The string below a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Open(BaseModel):
    """Object with arbitrary additional keys, except misspellings of its fields."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Choice in which some values are known but refused.

    A model validator refuses those with its own message; for any other value, the message lists the supported ones.
    """

    supported: tuple[str, ...]
    refused: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        if isinstance(value, str) and value not in (*self.supported, *self.refused):
            raise PydanticCustomError("literal_error", "one of", {"expected": _format_choices(self.supported)})
        return value


def one_of(*supported: str, refused: tuple[str, ...]) -> OneOf:
    """Return a choice between supported values; refused ones get their own message."""
    return OneOf(supported=supported, refused=refused)


def _format_choices(names: tuple[str, ...]) -> str:
    *first, last = (f"'{name}'" for name in names)
    return f"{', '.join(first)} or {last}" if first else last
