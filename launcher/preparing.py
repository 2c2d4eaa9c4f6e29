"""A planned run -> its prepared data: where the launcher stack meets the corpus."""

from __future__ import annotations

from collections.abc import Callable

from launcher.corpus.preparation import make_preparation
from launcher.corpus.prepare import Prepared, prepare
from launcher.corpus.tokenizer import load_tokenizer
from launcher.inputs import PlannedRun, base_folders


def prepare_planned(planned: PlannedRun, report: Callable[[str], None], advance: Callable[[int], None]) -> Prepared:
    tokenizer = load_tokenizer(planned.plan.base.name, base_folders(planned.loaded.folder))
    return prepare(make_preparation(planned.plan, planned.loaded.folder, tokenizer), report, advance)
