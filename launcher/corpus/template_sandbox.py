"""Sandbox of chat templates, which are untrusted code: no access to Python, and limits on time and memory.

A template is first compiled and rendered in a child process with resource limits (`check_template`), because a constant
such as 'a' * 10**10 is computed when it is compiled. Later, compiling and each rendering have limits, too. The child
process runs this file alone, so it imports nothing of the launcher at its top.
"""

from __future__ import annotations

import hashlib
import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SECONDS = 10
_MEMORY_MIB = 1024  # address space of the child process, or what a rendering may add to ours
_REUSED_SECONDS = 0.2  # reading the size of the address space takes as long as rendering a row
_STATM = Path("/proc/self/statm")
_HAS_STATM = _STATM.is_file()
MAX_CHARACTERS = 50_000_000  # of a rendered conversation
_LIMITING_SHELL = ("/bin/sh", "-c", 'ulimit -c 0 && ulimit -t "$0" && ulimit -v "$1" && shift && exec "$@"')
_FAILED = 3
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_SAMPLES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}],
    [{"role": "system", "content": "rule"}, {"role": "user", "content": "q " * 500}]
    + [{"role": "assistant", "content": "a\n" * 500}, {"role": "user", "content": "more"}] * 3,
)


class TemplateRejectsError(Exception):
    """The template rejects a conversation; the message is the reason for which the row is rejected."""


class TemplateLimitError(Exception):
    """The template needs too much time or memory."""


class _GenerationTag(Extension):
    """Ignores {% generation %}, which marks answers in some templates."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)  # the plan and the preparation compile the same ones
def compile_template(source: str) -> Any:
    """Compile a template in Jinja's immutable sandbox; raises TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _reject
    # A fixed date: the current one would make the prepared data depend on the day.
    environment.globals["strftime_now"] = datetime(2024, 1, 1).strftime
    del environment.filters["random"], environment.globals["lipsum"]  # other text in each rendering
    with _limit_memory():
        return environment.from_string(source)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize JSON without escaping < and >, unlike Jinja's own filter; the arguments are those of transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _reject(message: str) -> NoReturn:
    raise TemplateRejectsError(message)


def render_template(
    template: Any,
    turns: Sequence[Any],
    *,
    prompt: bool,
    tokens: dict[str, str],
    tools: Sequence[Any] = (),
    thinks: bool = False,
) -> str:
    """Render a conversation; raises TemplateLimitError after the time limit, and whatever the template raises.

    `enable_thinking` is passed as False; with `thinks` it is not passed, so that the template's default applies.
    """
    options = {} if thinks else {"enable_thinking": False}
    with limit_time(_SECONDS, TemplateLimitError(f"takes more than {_SECONDS} s for one row")), _limit_memory():
        try:
            text: str = template.render(
                messages=turns,
                add_generation_prompt=prompt,
                tools=list(tools) or None,
                documents=None,
                **options,
                **tokens,
            )
        except MemoryError:
            raise TemplateLimitError(f"needs more than {_MEMORY_MIB} MiB for one row") from None
    if len(text) > MAX_CHARACTERS:
        raise TemplateLimitError(f"writes more than {MAX_CHARACTERS:,} characters for one row")
    return text


@contextmanager
def _limit_memory() -> Iterator[None]:
    """Limit the address space that this block may add to the process, on Linux; only the main thread has this limit."""
    if threading.current_thread() is not threading.main_thread() or not _HAS_STATM:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = _read_address_space(round(time.monotonic() / _REUSED_SECONDS)) + _MEMORY_MIB * 2**20
    if any(bound != resource.RLIM_INFINITY and bound < limit for bound in before):
        limit = before[0]
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@lru_cache(maxsize=1)
def _read_address_space(_moment: int) -> int:
    """Return the bytes of this process's address space; rows of the same moment share a reading."""
    return int(_STATM.read_bytes().split()[0]) * resource.getpagesize()


@contextmanager
def limit_time(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in this block after some seconds, by a signal; only the main thread has this limit.

    A regular expression that is being matched is interrupted, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@lru_cache(maxsize=8)
def check_template(source: str) -> str:
    """Compile and render a template in a child process with limits; return why it cannot be used, or an empty text.

    Templates that passed are remembered in the cache folder: the next process need not start the child again.
    """
    from launcher.core.processes import make_clean_environment
    from launcher.core.run_paths import get_cache_folder
    from launcher.core.worker import WorkerError, run_command

    passed = get_cache_folder() / "templates" / _hash_check(source)
    with suppress(OSError):
        if passed.is_file():
            return ""
    child = [sys.executable, "-P", str(Path(__file__))]
    command = [*_LIMITING_SHELL, str(2 * _SECONDS), str(_MEMORY_MIB * 1024), *child]
    try:
        result = run_command(command, timeout=3 * _SECONDS, environment=make_clean_environment(), input_text=source)
    except WorkerError as error:
        return f"it {error}"
    if result.returncode == 0:
        with suppress(OSError):  # read-only or full disk: checked again next time
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
    if result.returncode in (0, 1):  # 1: not even this module can be loaded, so nothing is known
        return ""
    return result.stdout.strip()[:200] if result.returncode == _FAILED else "it needs too much time or memory"


def _hash_check(source: str) -> str:
    """Return a hash of the template and of what its check depends on: this file, Python's and Jinja's version."""
    from importlib.metadata import version  # the child process does not need it

    versions = f"{sys.version} {version('jinja2')}".encode()
    parts = (versions, Path(__file__).read_bytes(), source.encode(errors="surrogatepass"))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _main() -> int:
    """Compile and render the template on stdin; errors that only reject a sample conversation are ignored."""
    try:
        template = compile_template(sys.stdin.read())
        for turns in _SAMPLES:
            try:
                render_template(template, turns, prompt=True, tokens=dict.fromkeys(SPECIAL_NAMES, ""))
            except (MemoryError, TemplateLimitError):
                raise
            except Exception:
                continue
    except TemplateLimitError as error:
        print(f"it {error}")
        return _FAILED
    except (MemoryError, OverflowError, RecursionError):
        print("it needs too much memory")
        return _FAILED
    except TemplateError:  # reported when it is compiled again
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(_main())
