"""Hide installed packages that a run does not use: transformers and PEFT import them wherever they are installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# torchao, which nothing here uses, is imported by transformers 5; bitsandbytes by PEFT, as soon as LoRA is added.
_OPTIONAL = ("bitsandbytes", "gptqmodel", "scipy", "sklearn", "torchao", "torchaudio", "torchvision")


class _PartialFinder(PathFinder):
    """Python's finder of installed packages, without the hidden ones."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname in cls.hidden else super().find_spec(fullname, path, target)


def hide_unused_packages(used: Iterable[str]) -> None:
    """Make packages look as if they were not installed, in this process. Call before transformers is imported."""
    _PartialFinder.hidden = frozenset(_OPTIONAL) - frozenset(used)
    sys.meta_path[:] = [_PartialFinder if finder is PathFinder else finder for finder in sys.meta_path]
