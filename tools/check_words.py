"""Reject idioms that readers stumble over: `python -m tools.check_words [FILE or FOLDER …]`.

Each word on the list comes with what to write instead. Names count too: an underscore separates words.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".md", ".js", ".cjs", ".html", ".toml", ".yml", ".yaml", ""}
# Texts that are data, generated, written by others, or list these words on purpose.
SKIPPED = (
    "experts/",
    "LICENSE",
    "CHANGELOG.md",
    "tools/check_words.py",
    "launcher/analysis/compare/page/vendor/",
    "launcher/judges/node/",
    "tests/golden/render/",
)
# Pattern -> what to write instead.
IDIOMS = {
    r"told(?!_seconds)": "logged, reported, given",  # told_seconds: a key of wandb.json
    r"anew": "again",
    r"whoever": "the process, user or caller that …",
    r"nobody": "no user, no process, nothing",
    r"shall": "must, should, will",
    r"reckon\w*": "estimate, compute",
    r"(?<![\"])rungs?": "fallback, stage, backend",  # "rungs" is a key of old run directories and of W&B
    r"(?<![\"])ladders?": "fallbacks, ablation, backends",  # "ladder": a command of 0.1
    r"beside": "next to, alongside, in addition to",
    r"behind(?! a firewall| a proxy| a NAT)": "after",
    r"(?:taken|takes|take) up again": "resumed",
    r"(?:goes|go|going|went) on": "continues",
    r"(?:lies|lie|lay|stands|stand|stood) (?:in|at|on|there|here|below|above)": "is in",
    r"passed over": "skipped",
    r"(?:is|are) no numbers?": "is non-finite",
    r"as far as": "if, up to",
    r"at hand": "available",
    r"(?:tokens|rows|steps|samples|answers) an? (?:second|step|minute|line|row)": "per second, per step",
    r"(?:one|line|row) a (?:line|step|row)": "one per line, one per step",
    r"(?:is|are|was|were) asked for": "is requested",
    r"(?:is|are) not to be had": "is not available",
    r"come what may": "always",
}
_PATTERN = re.compile(
    "|".join(rf"(?P<w{i}>(?<![A-Za-z]){pattern}(?![A-Za-z]))" for i, pattern in enumerate(IDIOMS)), re.IGNORECASE
)


def list_files(arguments: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, arguments):
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]
    if arguments:
        return
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        file = ROOT / name
        if file.suffix in SUFFIXES and not name.startswith(SKIPPED) and file.is_file():
            yield file


def find_idioms(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, idiom and replacement for each idiom of a text."""
    replacements = list(IDIOMS.values())
    for number, line in enumerate(text.split("\n"), start=1):
        for match in _PATTERN.finditer(line):
            yield number, match[0], replacements[int((match.lastgroup or "w0")[1:])]


def main(arguments: Sequence[str]) -> int:
    count = 0
    for file in list_files(arguments):
        for number, idiom, replacement in find_idioms(file.read_text(encoding="utf-8", errors="replace")):
            name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
            print(f"{name}:{number}: {idiom!r}: write {replacement}", file=sys.stderr)
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
