"""What the manifest's own types have in common: strictness, open objects, and names that authors choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Scalar = str | float | bool | None


class Strict(BaseModel):
    """An object whose keys are all known: anything else is a mistake. The text below a field describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Open(BaseModel):
    """Metadata that authors extend. A new key is welcome, a slip of a known one is a mistake."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class CommonNames:
    """Names often used in a map whose keys the author chooses. Two swapped letters of one are taken for a slip."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """A choice of which some values are known but not supported: those are told apart by a rule with its own words,
    and a value that nobody knows is shown the supported ones only."""

    supported: tuple[str, ...]
    refused: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        if isinstance(value, str) and value not in (*self.supported, *self.refused):
            raise PydanticCustomError("literal_error", "one of", {"expected": _format_choices(self.supported)})
        return value


def one_of(*supported: str, refused: tuple[str, ...]) -> OneOf:
    return OneOf(supported=supported, refused=refused)


def _format_choices(names: tuple[str, ...]) -> str:
    *first, last = (f"'{name}'" for name in names)
    return f"{', '.join(first)} or {last}" if first else last


def _text_or_object(value: object) -> str:
    return "object" if isinstance(value, dict | BaseModel) else "text"


_Object = TypeVar("_Object", bound=BaseModel)

# A short form and a long form of one thing: decided by looking, so that only the form at hand complains.
TextOr = Annotated[Annotated[str, Tag("text")] | Annotated[_Object, Tag("object")], Discriminator(_text_or_object)]
