"""`launcher compare`: compare runs as an HTML page, Markdown, JSON or text."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.run_lookup import add_runs_dir, find_run, list_runs, resolve_expert_name
from launcher.core.errors import ExitCode, InputError, LauncherError, Problem, escape
from launcher.core.log import get_logger
from launcher.core.output_path import check_output_file
from launcher.core.redaction import redact_file
from launcher.core.run_paths import expand_home

if TYPE_CHECKING:
    from launcher.analysis.compare import Comparison, RunFacts
    from launcher.analysis.compare.model import Skipped

log = get_logger(__name__)


_DEFAULT_PAGE = "compare.html"
_STDOUT = "-"
_MARKS = ("made by launcher compare", '"made_by": "launcher compare"')  # near the beginning of every file written here
_MARKED_BYTES = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher compare`."""
    parser.add_argument("runs", type=expand_home, metavar="RUN", nargs="*", help="run id or directory")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--expert", type=expand_home, metavar="NAME", help="all runs of this expert")
    several.add_argument("--all", action="store_true", help="all runs")
    parser.add_argument("--last", metavar="N", type=int, help="only the newest N of them")
    add_runs_dir(parser)
    parser.add_argument(
        "--format",
        choices=("html", "md", "json", "text"),
        default="html",
        help="output format (default html); text is for terminals",
    )
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="short for --format json")
    parser.add_argument(
        "-o",
        "--output",
        type=expand_home,
        metavar="FILE",
        help=f"default: {_DEFAULT_PAGE}, and stdout for the other formats",
    )
    parser.add_argument("--force", action="store_true", help="overwrite a file that compare did not write")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Compare runs and write or print the result."""
    from launcher.analysis.compare import make_comparison

    arguments.json = arguments.format == "json"  # errors are printed as JSON, too
    file = _choose_file(arguments)
    runs, skipped = _load_runs(arguments)
    for item in skipped:
        log.warning(f"skipped {escape(item.place)}: {escape(item.why)}")
    title = f"{arguments.expert}: {len(runs)} runs compared" if arguments.expert and len(runs) > 1 else ""
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    comparison = make_comparison(runs, made_at=made_at, title=title, skipped=skipped)
    if file is None:
        _print(comparison, arguments.format)
    else:
        _write(comparison, arguments.format, file)
    return ExitCode.DONE


def _load_runs(arguments: argparse.Namespace) -> tuple[list[RunFacts], list[Skipped]]:
    """Return the runs to compare, and those of --all or --expert that are skipped because they cannot be read."""
    from launcher.analysis.compare import load_run_facts

    runs_dir = Path(arguments.runs_dir)
    if not arguments.runs and not arguments.all and arguments.expert is None:
        raise InputError("no runs given", hint="pass run ids or directories, --expert NAME or --all")
    if arguments.last is not None and arguments.last < 1:
        raise InputError(f"--last {arguments.last}: must be at least 1")
    if arguments.last is not None and not arguments.all and arguments.expert is None:
        hint = "add --expert NAME or --all, or omit --last"
        raise InputError("--last has no effect on runs that are named", hint=hint)
    loaded = [load_run_facts(find_run(name, runs_dir)) for name in arguments.runs]
    skipped: list[Skipped] = []
    if arguments.all or arguments.expert is not None:
        found = list(_load_matching(arguments, runs_dir, skipped))
        if not found and not loaded:
            raise _make_no_runs_error(arguments, runs_dir, skipped)
        loaded += found
    unique: dict[Path, RunFacts] = {}
    for facts in loaded:
        unique.setdefault(Path(facts.place).resolve(), facts)
    return list(unique.values()), skipped


def _load_matching(arguments: argparse.Namespace, runs_dir: Path, skipped: list[Skipped]) -> Iterator[RunFacts]:
    from launcher.analysis.compare import load_run_facts
    from launcher.analysis.compare.model import Skipped

    num_left = arguments.last
    expert = None if arguments.expert is None else resolve_expert_name(arguments.expert)
    for paths in list_runs(runs_dir):
        if num_left == 0:
            return
        try:
            facts = load_run_facts(paths)
        except LauncherError as error:
            skipped.append(Skipped(place=str(paths.root), why=error.title))
            continue
        if expert is None or facts.traits.expert == expert:
            num_left = None if num_left is None else num_left - 1
            yield facts


def _make_no_runs_error(arguments: argparse.Namespace, runs_dir: Path, skipped: list[Skipped]) -> InputError:
    of_expert = "" if arguments.expert is None else f" of {arguments.expert!r}"
    if skipped:
        problems = tuple(Problem(where=item.place, what=item.why) for item in skipped)
        return InputError(f"{runs_dir} has no run{of_expert} that can be read", problems)
    hint = "`launcher train EXPERT` creates one; --runs-dir selects another directory"
    if arguments.expert is not None and list_runs(runs_dir):
        hint = f"--all selects every run; {hint}"
    return InputError(f"{runs_dir} has no run{of_expert}", hint=hint)


def _choose_file(arguments: argparse.Namespace) -> Path | None:
    """Return the checked output file; None for stdout."""
    name = arguments.output
    if name is None:
        name = _DEFAULT_PAGE if arguments.format == "html" else _STDOUT
    if name == _STDOUT:
        return None
    file = check_output_file(name, "--output")
    if not arguments.force:
        _check_replaceable(file)
    return file


def _check_replaceable(path: Path) -> None:
    """Refuse an existing file that compare did not write."""
    try:
        with path.open("rb") as file:
            head = file.read(_MARKED_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="pass another --output") from None
    if head and not any(mark in head for mark in _MARKS):
        raise InputError(
            f"{path} exists and was not written by launcher compare",
            hint="pass another --output, or --force to overwrite it",
        )


def _render(comparison: Comparison, form: str) -> str:
    if form == "html":
        from launcher.analysis.compare.html import render_html

        return render_html(comparison)
    if form == "json":
        return comparison.model_dump_json(indent=2) + "\n"
    from launcher.analysis.compare.render_text import print_comparison, render_markdown

    if form == "md":
        return render_markdown(comparison)
    from rich.console import Console

    text = io.StringIO()
    print_comparison(comparison, Console(file=text, width=120, height=25))
    return text.getvalue()


def _print(comparison: Comparison, form: str) -> None:
    if form != "text":
        sys.stdout.write(redact_file(Path(f"page.{form}"), _render(comparison, form)))
        return
    from launcher.analysis.compare.render_text import print_comparison
    from launcher.cli.tables import make_console

    print_comparison(comparison, make_console(), is_unicode=_supports_unicode())


def _supports_unicode() -> bool:
    try:
        "★".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _write(comparison: Comparison, form: str, path: Path) -> None:
    from launcher.core.run_paths import write_text_atomically

    text = _render(comparison, form)
    write_text_atomically(path, text)
    runs = "1 run" if len(comparison.runs) == 1 else f"{len(comparison.runs)} runs"
    print(f"{escape(str(path))}: {runs}, {len(comparison.charts)} charts, {len(text.encode()) / 1e6:.1f} MB")
    for caution in comparison.cautions:
        if caution.level == "warning":
            affected = f" (affects {', '.join(caution.spoils)})" if caution.spoils else ""
            print(f"warning: {caution.title}{affected}")
    if form == "html":
        print(f"next: open {escape(str(path))} in a browser; it is one file, which needs no network")
