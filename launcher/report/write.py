"""runs/<id>/report.md, written at the end of a run, however it ended."""

from __future__ import annotations

import os

from launcher.errors import say
from launcher.paths import RunPaths, write_text_atomically
from launcher.redaction import find_known_secrets, redact_text
from launcher.report.facts import load_facts
from launcher.report.render import render_report


def make_report(paths: RunPaths) -> str:
    return redact_text(render_report(load_facts(paths)), find_known_secrets(os.environ))


def write_report(paths: RunPaths) -> None:
    """Never in the way of what it tells about: a full disk, or a bug of ours, is a warning and no more."""
    try:
        write_text_atomically(paths.report, make_report(paths))
    except Exception as error:
        told = str(error).strip() or type(error).__name__
        say(f"warning: no report was written: {told}")
