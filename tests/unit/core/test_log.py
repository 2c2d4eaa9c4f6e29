"""Console logging: prefixes, ranks, levels and secrets."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from launcher.core.log import LOG_LEVEL, configure, get_logger

log = get_logger("launcher.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    configure()


def test_levels_are_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    log.info("100 % done")
    log.warning("slow")
    log.error("broken")
    assert capsys.readouterr() == ("", "100 % done\nwarning: slow\nerror: broken\n")


def test_other_ranks_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    monkeypatch.setenv("RANK", "3")
    log.warning("slow")
    monkeypatch.setenv("RANK", "0")
    log.warning("slow")
    assert capsys.readouterr().err == "[rank 3] warning: slow\nwarning: slow\n"


def test_level_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(LOG_LEVEL, "ERROR")
    configure()
    log.warning("slow")
    log.error("broken")
    assert capsys.readouterr().err == "error: broken\n"
    monkeypatch.setenv(LOG_LEVEL, "loud")
    configure()
    log.info("shown")
    assert capsys.readouterr().err.splitlines()[1] == "shown"


def test_secrets_are_redacted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    configure()
    log.info("key 0123456789abcdef at https://me:word@host/")
    assert capsys.readouterr().err == "key *** at https://***@host/\n"


@pytest.mark.process
def test_import_configures_nothing() -> None:
    code = "import logging; from launcher.core.log import get_logger; get_logger('launcher.x').error('no')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert logging.getLogger("launcher").propagate is False  # of this process, which is configured
