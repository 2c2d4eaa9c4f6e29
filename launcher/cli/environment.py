"""Defaults of flags from environment variables LAUNCHER_<FLAG>. The command line takes precedence."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from launcher.core.errors import InputError, LauncherError, Problem

_PREFIX = "LAUNCHER_"
# Flags that users repeat. Flags that choose what is trained and where stay on the command line, where they are
# visible: a forgotten variable must not train something else.
FLAGS: Mapping[str, str] = {
    "--runs-dir": "folder of run directories",
    "--profile": "`auto`, `full` or `smoke`",
    "--base": "another base model than the manifest's; `launcher new` writes it into a manifest",
    "--strategy": "`ddp`, `fsdp2`, `hsdp`, `zero1`, `zero2` or `zero3`",
    "--price": "price per hour of a GPU or a node",
    "--on-save-error": "`stop` or `continue`",
    "--max-nonfinite-steps": "consecutive steps with NaN/Inf loss or gradients before aborting",
    "--max-restarts": "how often a crashed training is restarted",
    "--hang-timeout": "seconds without a completed step before a training is aborted",
    "--join-timeout": "seconds that nodes wait for each other",
    "--partition": "Slurm partition",
    "--account": "Slurm account",
    "--time-limit": "time limit of a job",
    "--image": "container image of jobs",
    "--volume": "volume of jobs",
}
# Variables without a flag. Those of tests and between processes are never typed by hand.
OTHERS = (
    "LAUNCHER_DATA_DIR",
    "LAUNCHER_MODELS_DIR",
    "LAUNCHER_CACHE_DIR",
    "LAUNCHER_CALIBRATION",
    "LAUNCHER_HARDWARE",
    "LAUNCHER_NODE_DIR",
    "LAUNCHER_LOG_LEVEL",
    "LAUNCHER_TRUST",
)
# A resumed run keeps its settings: only these flags belong to the call, not to the run.
_RENAMED = {f"{_PREFIX}MAX_BAD_STEPS": "MAX_NONFINITE_STEPS"}  # of launcher 0.1
_CALL_FLAGS = frozenset(
    {
        *("--runs-dir", "--max-restarts", "--join-timeout"),
        *("--partition", "--account", "--time-limit", "--image", "--volume"),
    }
)


def name_variable(flag: str) -> str:
    """Return the environment variable that sets a flag's default, such as LAUNCHER_RUNS_DIR for --runs-dir."""
    return f"{_PREFIX}{flag.removeprefix('--').replace('-', '_').upper()}"


def apply_environment(parser: argparse.ArgumentParser, words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Set the flag defaults of the verb in `words` from LAUNCHER_* variables; raise InputError for invalid values."""
    resumes = any(word == "--resume" or word.startswith("--resume=") for word in words)
    problems = []
    for action in find_actions(parser, words):
        flag = next((name for name in action.option_strings if name in FLAGS), None)
        value = "" if flag is None else environ.get(name_variable(flag), "")
        if flag is None or not value or action.nargs == 0 or (resumes and flag not in _CALL_FLAGS):
            continue
        try:
            action.default = _convert(action, value)
        except (argparse.ArgumentTypeError, ValueError) as error:
            problems.append(Problem(where=name_variable(flag), what=str(error)))
    if problems:
        raise InputError("invalid value in an environment variable", tuple(problems))


def name_cause(error: LauncherError, words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Add to the hint of an error about a flag that a variable has set it, if it is not on the command line."""
    for flag in FLAGS:
        variable, is_typed = name_variable(flag), any(word.partition("=")[0] == flag for word in words)
        is_named = error.title.startswith(f"{flag} ") or any(problem.where == flag for problem in error.problems)
        if environ.get(variable) and is_named and not is_typed:
            error.hint += f"{'; ' * bool(error.hint)}{flag} is set by the environment variable {variable}"


def find_misspelt(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield unknown LAUNCHER_* variables, each with the known variable whose name is similar."""
    known = {name.removeprefix(_PREFIX) for name in (*OTHERS, *map(name_variable, FLAGS))}
    unknown = [name for name in environ if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in known]
    if not unknown:
        return
    from launcher.manifest.suggest import find_closest

    for name in unknown:
        if (suggestion := _RENAMED.get(name) or find_closest(name.removeprefix(_PREFIX), known)) is not None:
            yield name, f"{_PREFIX}{suggestion}"


def find_actions(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[argparse.Action]:
    """Yield the argparse actions of a verb, and of its subcommand if it has one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = action.choices.get(words[0]) if words else None
            if inner is not None:
                yield from find_actions(inner, words[1:])
        else:
            yield action


def _convert(action: argparse.Action, value: str) -> object:
    converted = action.type(value) if callable(action.type) else value
    if action.choices is not None and converted not in action.choices:
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, action.choices))}")
    return converted
