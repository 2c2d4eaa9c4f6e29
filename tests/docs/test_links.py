"""Links and file names in the docs resolve."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, expert_manifests
from tests.docs.markdown import PAGES, Piece, list_anchors, list_links, list_spans

ALL_PAGES = (
    *PAGES,
    ROOT / "CHANGELOG.md",
    *(file.parent / "sample/README.md" for file in expert_manifests()),
    ROOT / "launcher/base_models/tiny_base/README.md",
    ROOT / "launcher/training/kernels/README.md",
)
_FOLDERS = "accelerate_configs|benchmarks|docs|ds_configs|experts|launcher|tests|tools|\\.ci|\\.github"
_FILE = re.compile(
    rf"^(?:{_FOLDERS})/[\w./*-]*$|^(?:README|CHANGELOG|CONTRIBUTING|[A-Z_]+)\.md$|^[\w.]*(?:Dockerfile|Makefile)$"
)
# Files of a run directory or of a user.
_ELSEWHERE = {"README.md", "experts/shop/manifest.json"}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert [str(link) for link in list_links(page) if not resolves(link)] == []


def resolves(link: Piece) -> bool:
    """External addresses are not checked: tests have no network."""
    if re.match(r"^https://\S+$", link.text):
        return True
    name, _, anchor = link.text.partition("#")
    target = (link.page.parent / name).resolve() if name else link.page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or anchor in list_anchors(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = [span for span in list_spans(page) if _FILE.match(span.text) and span.text not in _ELSEWHERE]
    assert [str(span) for span in named if not exists(span)] == []


def exists(span: Piece) -> bool:
    """Look in the repository, the page's folder and docs/."""
    tops = (ROOT, span.page.parent, ROOT / "docs")
    return any(list(top.glob(span.text.rstrip("/"))) for top in tops)


def test_modules_named_in_the_architecture_exist() -> None:
    names = {path.name for path in (ROOT / "launcher").rglob("*") if "__pycache__" not in path.parts}
    shape = re.compile(r"^(?!tests/)[\w/*]+\.py$|^[a-z_]+/$")
    spans = [span for span in list_spans(ROOT / "docs/ARCHITECTURE.md") if shape.match(span.text)]
    unknown = [str(span) for span in spans if not _is_named(span.text.rstrip("/").rpartition("/")[2], names)]
    assert unknown == []


def _is_named(name: str, names: set[str]) -> bool:
    pattern = re.compile(re.escape(name).replace(r"\*", ".*") + "$")
    return any(pattern.match(known) for known in names)


def test_every_entry_of_the_package_is_in_the_architecture() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    entries = [path.name for path in (ROOT / "launcher").iterdir() if not path.name.startswith(("_", "py.typed"))]
    named = {name.rstrip("/") for name in re.findall(r"`([\w./]+)`", text)}
    assert sorted(set(entries) - named) == []


def test_every_entry_of_the_repository_is_in_the_contributing_page() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    tops = {name.split("/")[0] for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    text = (ROOT / "docs/CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {name.split("/")[0] for name in re.findall(r"`([\w./-]+)`", text)}
    assert sorted(tops - named - {"README.md", ".gitignore"}) == []


def test_every_page_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"`docs/{page.name}`" not in text] == []


def test_pictures_are_small() -> None:
    assert [str(file) for file in (ROOT / "docs/images").iterdir() if file.stat().st_size > 200_000] == []
