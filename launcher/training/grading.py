"""`python -m launcher.training.grading`: asks an expert its held-out rows, and has a judge look at the answers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from launcher.corpus.preparation import make_preparation
from launcher.corpus.questions import HeldOut, read_held_out
from launcher.corpus.tokenizer import load_tokenizer
from launcher.errors import say
from launcher.inputs import base_folders
from launcher.manifest.metadata import Decoding
from launcher.paths import write_text_atomically
from launcher.quality.judges import open_judge
from launcher.training.graded import Asked, grade
from launcher.training.guards import end_with_parents
from launcher.training.quiet import quiet_transformers
from launcher.training.subjects import Subject, find_subject
from launcher.training.verb import run_verb
from launcher.units import format_duration

_DEFAULT_NEW_TOKENS = 512
_SHOW_EVERY_SECONDS = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _make_parser().parse_args(argv)
    end_with_parents()
    return run_verb("eval", lambda: _grade(arguments), is_json=arguments.json)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.training.grading", description=__doc__)
    parser.add_argument("--run", type=Path, metavar="DIR")
    parser.add_argument("--expert", metavar="NAME")
    parser.add_argument("--adapter", type=Path, metavar="DIR")
    parser.add_argument("--profile", default="auto")
    parser.add_argument("--rows", type=int, metavar="N")
    parser.add_argument("--split", choices=("test", "validation"))
    parser.add_argument("--batch-size", type=int, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=_DEFAULT_NEW_TOKENS, metavar="N")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="nothing on stdout")
    return parser


def _grade(arguments: argparse.Namespace) -> str:
    subject = find_subject(
        run=arguments.run, adapter=arguments.adapter, expert=arguments.expert, profile=arguments.profile
    )
    plan, folder = subject.plan, Path(subject.plan.data.folder)
    with closing(open_judge(subject.manifest)) as judge:  # what is missing is said before anything is loaded
        tokenizer = load_tokenizer(plan.base.name, base_folders(folder), any_will_do=plan.random_weights)
        held_out = read_held_out(make_preparation(plan, folder, tokenizer), arguments.rows, arguments.split)
        asked = _ask(subject, held_out, arguments)
        title, manifest = subject.title, subject.manifest
        result = grade(judge, held_out, asked, title=title, plan=plan, manifest=manifest)
    write_text_atomically(arguments.out, result.model_dump_json(indent=1) + "\n")
    return "" if arguments.quiet else str(arguments.out)


def _ask(subject: Subject, held_out: HeldOut, arguments: argparse.Namespace) -> Asked:
    from launcher.training.answering import load_generator

    quiet_transformers()
    say(f"asking {subject.title}: {len(held_out.rows)} of {held_out.num_rows} {held_out.split} rows")
    generator = load_generator(
        subject.load(),
        subject.plan,
        decoding=subject.manifest.training.decoding or Decoding(),
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
    )
    progress = _Progress(len(held_out.rows))
    began = time.monotonic()
    answers = generator.answer([row.prompt for row in held_out.rows], progress.advance)
    progress.end()
    return Asked(answers=answers, max_new_tokens=arguments.max_new_tokens, seconds=time.monotonic() - began)


class _Progress:
    """A moving line on a terminal, now and then a line elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._began = total, 0, time.monotonic()
        self._shown, self._is_terminal = self._began, sys.stderr.isatty()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._shown < _SHOW_EVERY_SECONDS * (1 if self._is_terminal else 10):
            return
        self._shown = now
        rate = self._done / max(1e-9, now - self._began)
        text = f"{self._done}/{self._total}  {rate:.1f} examples/s  "
        text += f"{format_duration((self._total - self._done) / max(1e-9, rate))} left"
        print(f"\r\033[K{text}" if self._is_terminal else text, end="" if self._is_terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def end(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
