"""Writes CLI.md, EXPERT_FORMAT.md, gpus.md and images/plan.svg in docs/, or tells which are not what the code says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.guides.cards import render_cards
from launcher.guides.command_line import render_command_line
from launcher.guides.manifest_format import render_manifest_format
from launcher.guides.plan_picture import render_plan_picture

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "CLI.md": render_command_line,
    "EXPERT_FORMAT.md": render_manifest_format,
    "gpus.md": render_cards,
    "images/plan.svg": render_plan_picture,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launcher.guides", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a page is not current")
    texts = {DOCS / name: render() for name, render in PAGES.items()}
    if not parser.parse_args(arguments).check:
        for file, text in texts.items():
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return 0
    old = [file.relative_to(DOCS) for file, text in texts.items() if not _holds(file, text)]
    for name in old:
        print(f"docs/{name} is not what the code says: python -m launcher.guides", file=sys.stderr)
    return int(bool(old))


def _holds(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
