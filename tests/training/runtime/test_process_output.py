"""Which warnings of libraries a user sees."""

from __future__ import annotations

import warnings

import pytest

from launcher.training.runtime.process_output import silence_libraries


def test_only_known_warnings_are_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "")  # restored afterwards
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        silence_libraries()
        for attribute in ("is_gradient_checkpointing", "another"):  # of transformers, read by PEFT
            warnings.warn(f"`{attribute}` is deprecated and will be removed in v6.", FutureWarning, stacklevel=1)
    assert [str(warning.message)[:9] for warning in shown] == ["`another`"]
