"""Hide installed packages that a run does not use, and make transformers' own start quicker.

transformers and PEFT import optional packages wherever they are installed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

# torchao, which nothing here uses, is imported by transformers 5; bitsandbytes by PEFT, as soon as LoRA is added.
_OPTIONAL = ("bitsandbytes", "gptqmodel", "scipy", "sklearn", "torchao", "torchaudio", "torchvision")
_SCANNER = "transformers.utils.import_utils"


class _PartialFinder(PathFinder):
    """Import finder that does not find the hidden packages."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = None if fullname in cls.hidden else super().find_spec(fullname, path, target)
        if fullname == _SCANNER and spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _ScannerLoader(spec.loader.name, spec.loader.path)
        return spec


class _ScannerLoader(SourceFileLoader):
    """Loader that speeds up the transformers module that reads `__all__` from 1,600 model files, twice at each start.

    The module searches all lines of each file, and its LRU cache of 128 entries is too small for 540 folders.
    """

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        names = vars(module)
        scan, fetch = names.get("create_import_structure_from_path"), names.get("fetch__all__")
        if scan is None or not hasattr(scan, "cache_clear") or fetch is None:
            return  # another version of transformers

        def fetch_from_last(content: str) -> list[str]:
            return fetch(content[content.rfind("\n__all__") + 1 :])  # the last definition counts

        names["create_import_structure_from_path"] = functools.cache(scan.__wrapped__)
        names["fetch__all__"] = fetch_from_last


def hide_unused_packages(used: Iterable[str]) -> None:
    """Make packages look as if they were not installed, in this process. Call before transformers is imported."""
    _PartialFinder.hidden = frozenset(_OPTIONAL) - frozenset(used)
    sys.meta_path[:] = [_PartialFinder if finder is PathFinder else finder for finder in sys.meta_path]
