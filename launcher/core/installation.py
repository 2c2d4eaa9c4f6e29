"""What is installed: packages of the extras, and the pages of the documentation."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.core.choices import DEEPSPEED_STRATEGIES, Strategy
from launcher.core.errors import InputError

DATA_PACKAGES = ("jinja2", "numpy", "pyarrow", "tokenizers")
TRAIN_PACKAGES = ("accelerate", *DATA_PACKAGES, "peft", "torch", "transformers")

_PACKAGE = Path(__file__).resolve().parent.parent


def is_checkout() -> bool:
    """Return whether this package is a checkout, which has a Makefile, and not an installed wheel."""
    return (_PACKAGE.parent / "Makefile").is_file() and (_PACKAGE.parent / "pyproject.toml").is_file()


def format_install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'expert-launcher[{extra}]'"


def find_missing(packages: Sequence[str]) -> list[str]:
    """Return the packages that are not installed, without importing any."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def find_missing_for_training(strategy: Strategy) -> list[str]:
    """Return the packages that a training with this strategy lacks."""
    return find_missing((*TRAIN_PACKAGES, "deepspeed") if strategy in DEEPSPEED_STRATEGIES else TRAIN_PACKAGES)


def make_missing_error(what: str, packages: Sequence[str], extra: str = "train") -> InputError:
    """Return the error for something that needs packages of an extra."""
    also = ", or `make train`, which installs them" if extra == "train" and is_checkout() else ""
    return InputError(
        f"{what} needs packages that are not installed: {', '.join(packages)}", hint=format_install(extra) + also
    )


def explain_missing_module(error: ModuleNotFoundError, what: str, extra: str = "train") -> InputError | None:
    """Return the error for a failed import; None for a module of this package, whose absence is a bug."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "launcher"):
        return None
    packages = DATA_PACKAGES if extra == "data" else TRAIN_PACKAGES
    if missing := find_missing(packages) or [one for one in packages if one == name]:
        return make_missing_error(what, missing, extra)
    return InputError(f"{what} needs a package that is not installed: {name}", hint=f"pip install {name}")


def find_page(name: str) -> str:
    """Return the path of a page of the documentation, as seen from the working directory."""
    page = _PACKAGE / "docs" / name  # of a wheel
    page = page if page.is_file() else _PACKAGE.parent / "docs" / name
    with suppress(OSError, ValueError):
        return str(page.relative_to(Path.cwd()))
    return str(page)
