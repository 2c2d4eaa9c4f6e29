"""Base class of the pydantic models that are stored on disk: frozen, without unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A frozen pydantic model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def flatten(value: object, path: str = "") -> dict[str, object]:
    """Flatten nested dictionaries to dotted keys; a list is one value."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    parts = (flatten(below, f"{path}.{key}" if path else str(key)) for key, below in value.items())
    return {key: leaf for part in parts for key, leaf in part.items()}
