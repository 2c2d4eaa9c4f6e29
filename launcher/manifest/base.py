"""What the manifest's own types have in common: strictness, open objects, and names that authors choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

Scalar = str | float | bool | None


class Strict(BaseModel):
    """An object whose keys are all known: anything else is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Open(BaseModel):
    """Metadata that authors extend. A new key is welcome, a slip of a known one is a mistake."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class CommonNames:
    """Names often used in a map whose keys the author chooses. Two swapped letters of one are taken for a slip."""

    names: tuple[str, ...]


def _text_or_object(value: object) -> str:
    return "object" if isinstance(value, dict | BaseModel) else "text"


_Object = TypeVar("_Object", bound=BaseModel)

# A short form and a long form of one thing: decided by looking, so that only the form at hand complains.
TextOr = Annotated[Annotated[str, Tag("text")] | Annotated[_Object, Tag("object")], Discriminator(_text_or_object)]
