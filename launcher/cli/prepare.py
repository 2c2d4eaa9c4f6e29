"""`launcher prepare`: tokenize, mask, audit and pack an expert's data, or find it in the cache."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from launcher.cli.tables import format_bar, make_console, print_json, print_table
from launcher.core.errors import ExitCode
from launcher.core.units import format_percent
from launcher.request.arguments import add_request_arguments, make_request

if TYPE_CHECKING:
    from launcher.corpus.audit import Audit, SampleSegment, SplitAudit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher prepare`."""
    add_request_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the audit as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run `launcher prepare`."""
    from launcher.core.progress import Progress
    from launcher.launch.prepare_data import prepare_planned
    from launcher.request.request import plan_request

    planned = plan_request(make_request(arguments))
    with Progress(planned.plan.data.num_rows) as progress:
        prepared = prepare_planned(planned, progress.report, progress.advance)
    audit = prepared.store.audit
    if arguments.json:
        folder = str(prepared.store.folder)
        print_json({"store": folder, "hit": prepared.was_cached, "audit": audit.model_dump(mode="json")})
        return ExitCode.DONE
    print_audit(planned.plan.expert, audit)
    state = "cached" if prepared.was_cached else f"built in {prepared.seconds:.1f} s"
    print(f"\nPrepared data: {prepared.store.folder} ({state})")
    return ExitCode.DONE


_SHOWN_CHARACTERS = 600


def print_audit(expert: str, audit: Audit) -> None:
    """Print the audit of an expert's data."""
    how = "packed" if audit.is_packed else "one row per sequence"
    what = "every token" if audit.loss_on == "all" else "answers only"
    print(f"{expert}: template {audit.template}, trained on {what}, {how}\n")
    names = list(audit.splits)
    rows = [(title, *(cell(audit.splits[name]) for name in names)) for title, cell in _LINES]
    print_table(("", *names), rows, styles=("cyan",))
    for line in describe_rejected(audit):
        print(line)
    for note in audit.notes:
        print(f"note: {note}")
    _print_histogram(next(iter(audit.splits.values())))
    _print_sample(audit)


def describe_rejected(audit: Audit) -> Iterator[str]:
    """Yield a text for each reason why rows were rejected, with the number of rows and their first line numbers."""
    for name, split in audit.splits.items():
        for reason, count in sorted(split.rejected.items(), key=lambda item: -item[1]):
            places = ", ".join(map(str, split.rejected_places[reason][:5]))
            rows = "1 row" if count == 1 else f"{count:,} rows"
            yield f"rejected ({name}): {rows}: {_visible(reason)} (line {places}{', ...' if count > 5 else ''})"


_LINES: tuple[tuple[str, Callable[[SplitAudit], str]], ...] = (
    ("rows read", lambda split: f"{split.num_rows:,}"),
    ("documents", lambda split: f"{split.num_documents:,}"),
    ("tokens", lambda split: f"{split.num_tokens:,}"),
    ("trained", lambda split: f"{split.num_trained:,} ({format_percent(split.trained_share)})"),
    ("mean / longest", lambda split: f"{split.mean_length:.0f} / {split.max_length:,} tokens"),
    ("end token trained", lambda split: f"{split.num_ends_trained:,} of {split.num_documents:,}"),
    ("truncated / untrained", lambda split: f"{split.num_cut:,} / {split.num_untrained:,}"),
    ("duplicates", lambda split: f"{split.num_duplicates:,}"),
    ("sequences", lambda split: f"{split.num_packs:,} of {split.capacity:,} tokens"),
    ("packing efficiency", lambda split: f"{100 * split.packing_efficiency:.2f} %"),
)


def _print_histogram(split: SplitAudit) -> None:
    print("\nLengths in tokens:")
    most = max((count for _, count in split.histogram), default=0) or 1
    rows = [(f"to {edge:,}", f"{count:,}", format_bar(count / most)) for edge, count in split.histogram]
    print_table(("", "documents", ""), rows, styles=("cyan", "", "green"))


def _print_sample(audit: Audit) -> None:
    print("\nOne row; trained tokens are marked with |:")
    print_segments(audit.sample)


def print_segments(segments: Sequence[SampleSegment]) -> None:
    """Print the segments of a row; those that count in the loss have a bar at the left, and a color if supported."""
    console = make_console()
    for segment in segments:
        text = segment.text if len(segment.text) <= _SHOWN_CHARACTERS else _shortened(segment.text)
        mark, style = ("| ", "bold green") if segment.is_trained else ("  ", "dim")
        for line in text.splitlines():
            console.print(mark + _visible(line), style=style, markup=False, soft_wrap=True)


def _visible(text: str) -> str:
    """Escape control characters, because rows are untrusted."""
    return "".join(letter if letter.isprintable() or letter == "\t" else ascii(letter)[1:-1] for letter in text)


def _shortened(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} characters) ...\n{text[-half:]}"
