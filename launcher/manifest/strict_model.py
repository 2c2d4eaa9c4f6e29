"""Building blocks of the manifest's types: strict and open objects, ignored keys."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from launcher.core.run_paths import expand_home
from launcher.manifest.suggest import find_typo

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=10**12)]
# A file or folder, or a name on the Hub.
LocalPath = Annotated[str, AfterValidator(expand_home)]
NonEmptyPath = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]
# A key without effect: any JSON value, so that published manifests load. `ignored_keys.py` gives the reasons.
Ignored = JsonValue


def is_ignored(annotation: object) -> bool:
    """Return whether a type annotation is Ignored, which marks manifest keys that have no effect."""
    return annotation is Ignored


class Strict(BaseModel):
    """Object without unknown keys. The string below a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Open(BaseModel):
    """Object with arbitrary additional keys, except misspellings of its fields."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_extra_keys(self) -> Self:
        for key in self.model_extra or {}:
            typo = find_typo(key, type(self).model_fields)
            if typo is not None:
                raise ValueError(f"{key}: unknown key; did you mean {typo}?")
        return self


def find_models(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in a type annotation, including those in unions, lists and maps."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, tuple, dict, Annotated):
        for argument in get_args(annotation):
            yield from find_models(argument)
