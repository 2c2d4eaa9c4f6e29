"""Hints that can be followed in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.core import installation
from launcher.core.installation import explain_missing_module, find_page, make_missing_error
from tests.conftest import ROOT


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the package's folder of an installed wheel."""
    package = tmp_path / "site-packages/launcher"
    (package / "docs").mkdir(parents=True)
    (package / "docs/CLI.md").write_text("")
    monkeypatch.setattr(installation, "_PACKAGE", package)
    return package


def test_pages_are_named_as_seen_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_page("CLI.md") == "docs/CLI.md"
    monkeypatch.chdir(tmp_path)
    assert find_page("CLI.md") == str(ROOT / "docs/CLI.md")


def test_a_wheel_has_its_own_pages(wheel: Path) -> None:
    assert find_page("CLI.md") == str(wheel / "docs/CLI.md")


@pytest.mark.usefixtures("wheel")
def test_make_is_not_suggested_outside_of_a_checkout() -> None:
    assert make_missing_error("training", ["torch"]).hint == "pip install 'expert-launcher[train]'"


def test_a_missing_module_is_explained_unless_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain_missing_module(ModuleNotFoundError(name="launcher.gone"), "x") is None
    own = explain_missing_module(ModuleNotFoundError(name="einops.layers"), "x")
    assert own is not None
    assert own.hint == "pip install einops"
    monkeypatch.setattr(installation, "TRAIN_PACKAGES", ("torch", "not_there"))
    extra = explain_missing_module(ModuleNotFoundError(name="not_there"), "x", "train,sweep")
    assert extra is not None
    assert (extra.title, extra.hint) == (
        "x needs packages that are not installed: not_there",
        "pip install 'expert-launcher[train,sweep]'",
    )
