"""A complete folder for llama.cpp and Ollama: GGUF files, Modelfile and model card."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import AutoConfig

from launcher.core.run_paths import write_text_atomically
from launcher.corpus.documents import make_planned_template
from launcher.corpus.end_token import collect_end_ids
from launcher.corpus.tokenizer import load_planned_tokenizer
from launcher.request.request import base_folders
from launcher.training.export.gguf import (
    INSTALL_LLAMA,
    QUANTIZATIONS,
    find_window,
    has_llama_cpp,
    write_exact,
    write_files,
)
from launcher.training.export.gguf_check import ModelCheck, check_files, render_checks
from launcher.training.export.merge import merge_into, render_export_card
from launcher.training.export.model_card import CARD_FILE
from launcher.training.export.serving import describe_window, render_modelfile
from launcher.training.inference.trained_run import TrainedRun


def write_gguf(
    folder: Path,
    run: TrainedRun,
    quantizations: Sequence[str],
    *,
    llama_cpp: Path | None,
    num_rows: int,
    report: Callable[[str], None],
) -> tuple[list[ModelCheck], int | None]:
    """Write the folder and return how its files answered, empty if they were not run, and a limit of their context."""
    merged = folder / "merged"
    merged.mkdir()
    dtype, _ = merge_into(merged, run, None, report)
    tokenizer = load_planned_tokenizer(run.plan, base_folders(Path(run.plan.data.folder)))
    ends = collect_end_ids(tokenizer, make_planned_template(run.plan.data, tokenizer).end_token)
    window = find_window(AutoConfig.from_pretrained(str(merged), trust_remote_code=run.trusts_code))
    if window is not None:
        report(f"note: {describe_window(window)}")
    ordered = sorted(quantizations, key=QUANTIZATIONS.index)
    files = write_files(folder, merged, ordered, expert=run.plan.expert, ends=ends, llama_cpp=llama_cpp, report=report)
    checks: list[ModelCheck] = []
    if num_rows and has_llama_cpp():
        checks = check_files(
            files,
            merged,
            run,
            tokenizer=tokenizer,
            dtype=dtype,
            ends=ends,
            num_rows=num_rows,
            window=window,
            write_exact=lambda: write_exact(merged, merged, run.plan.expert, ends, llama_cpp),
            report=report,
        )
    elif num_rows:
        report(f"note: the files were not run, because llama-cpp-python is not installed; {INSTALL_LLAMA}")
    shutil.rmtree(merged)
    names = [file.name for file in files.values()]
    card = render_export_card(
        "gguf", run, dtype, files=names, checks=render_checks(checks) if checks else (), window=window
    )
    write_text_atomically(folder / CARD_FILE, card)
    modelfile = render_modelfile(run.plan, run.manifest, tokenizer, names[-1], ends, window)
    write_text_atomically(folder / "Modelfile", modelfile)
    return checks, window
