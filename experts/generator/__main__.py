"""Write the samples of the experts.

python -m experts.generator            make the rows, check each one with its parser, write them (a minute or two)
python -m experts.generator --check    list the files that differ from what would be written, and exit with 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experts.generator.splits import EXPERTS, SPLITS, load_checker, make_splits, render_rows

EXPERTS_FOLDER = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None, folder: Path = EXPERTS_FOLDER) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experts.generator", description="Write the samples of the experts."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    stale = False
    only_check = parser.parse_args(arguments).check
    for name in EXPERTS:
        texts = {split: render_rows(rows) for split, rows in _make(name, with_parsers=not only_check).items()}
        for split in SPLITS:
            file = folder / name / "sample" / f"{split}.jsonl"
            if only_check and not _is_current(file, texts[split]):
                print(f"{file.relative_to(folder.parent)} is not what the generator makes", file=sys.stderr)
                stale = True
            elif not only_check:
                _write(file, texts[split])
    return int(stale)


def _make(name: str, with_parsers: bool) -> dict[str, list[dict[str, str]]]:
    splits = make_splits(name)
    if with_parsers:
        check_row = load_checker(name)
        for rows in splits.values():
            for row in rows:
                check_row(row)
    return splits


def _is_current(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(f"{file.parent.parent.name} {file.name}: {text.count(chr(10)):,} rows, {len(text.encode()):,} bytes")


if __name__ == "__main__":
    sys.exit(main())
