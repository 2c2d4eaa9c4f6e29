"""The base of every value that crosses the disk: frozen, strict, with no unknown keys; and such values laid flat."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def flatten(value: object, path: str = "") -> dict[str, object]:
    """Dotted keys of the leaves. A list is one leaf."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    parts = (flatten(below, f"{path}.{key}" if path else str(key)) for key, below in value.items())
    return {key: leaf for part in parts for key, leaf in part.items()}
