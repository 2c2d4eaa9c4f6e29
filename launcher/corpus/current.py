"""The key that an expert's manifest would prepare today, where its data and tokenizer are on this machine."""

from __future__ import annotations

from pathlib import Path

from launcher.corpus.preparation import make_preparation
from launcher.corpus.store import make_key
from launcher.corpus.tokenizer import load_tokenizer
from launcher.errors import LauncherError
from launcher.plan.model import Plan


def find_current_key(plan: Plan, folder: Path, search: tuple[Path, ...]) -> str | None:
    """None where it cannot be told: no tokenizer, no file, no hub."""
    try:
        preparation = make_preparation(plan, folder, load_tokenizer(plan.base.name, search))
        return make_key(preparation.key_parts())
    except LauncherError:
        return None
