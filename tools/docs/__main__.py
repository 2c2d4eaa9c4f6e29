"""Write CLI.md, EXPERT_FORMAT.md, families.md, gpus.md and images/plan.svg in docs/, or check that they are current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.docs.command_line import render_command_line
from tools.docs.families_page import render_families
from tools.docs.gpu_pages import render_gpus
from tools.docs.manifest_format import render_manifest_format
from tools.docs.plan_picture import render_plan_picture

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "CLI.md": render_command_line,
    "EXPERT_FORMAT.md": render_manifest_format,
    "families.md": render_families,
    "gpus.md": render_gpus,
    "images/plan.svg": render_plan_picture,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    texts = {DOCS / name: render() for name, render in PAGES.items()}
    if not parser.parse_args(arguments).check:
        for file, text in texts.items():
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return 0
    outdated = [file.relative_to(DOCS) for file, text in texts.items() if not _is_current(file, text)]
    for name in outdated:
        print(f"docs/{name} is out of date; run: python -m tools.docs", file=sys.stderr)
    return int(bool(outdated))


def _is_current(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
