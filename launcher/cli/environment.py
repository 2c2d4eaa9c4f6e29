"""LAUNCHER_<FLAG>: defaults of flags from the environment. What stands on the command line wins."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from launcher.errors import InputError, Problem

_PREFIX = "LAUNCHER_"
# Flags that people give again and again. Whatever says what is trained or where it runs stays on the command line,
# where it is seen: a forgotten variable shall not train something else.
FLAGS: Mapping[str, str] = {
    "--runs-dir": "where run directories lie",
    "--profile": "`auto`, `full` or `smoke`",
    "--base": "another base model than the manifests'; `launcher new` writes it into a manifest",
    "--strategy": "`ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`",
    "--price": "of one GPU for one hour",
    "--on-save-error": "`stop` or `continue`",
    "--max-bad-steps": "steps in a row that may be no numbers",
    "--max-restarts": "how often a training that died is started again",
    "--hang-timeout": "seconds without a step before a training is ended",
    "--join-timeout": "seconds that nodes wait for each other",
    "--partition": "of Slurm",
    "--account": "of Slurm",
    "--time-limit": "of Slurm",
}
# Not of a flag. Those of the tests, and of processes that talk to each other, are never misspelt by hand.
OTHERS = (
    "LAUNCHER_DATA_DIR",
    "LAUNCHER_MODELS_DIR",
    "LAUNCHER_CACHE_DIR",
    "LAUNCHER_CALIBRATION",
    "LAUNCHER_HARDWARE",
    "LAUNCHER_NODE_DIR",
)
# A run that is taken up again is what it was: only these are about the call, not about the run.
_OF_THE_CALL = frozenset({"--runs-dir", "--max-restarts", "--join-timeout", "--partition", "--account", "--time-limit"})


def name_variable(flag: str) -> str:
    return f"{_PREFIX}{flag.removeprefix('--').replace('-', '_').upper()}"


def apply_environment(parser: argparse.ArgumentParser, words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Sets defaults of the verb that is called; a value that its flag would refuse is refused here, by its name."""
    resumes = any(word == "--resume" or word.startswith("--resume=") for word in words)
    problems = []
    for action in _find_actions(parser, words):
        flag = next((name for name in action.option_strings if name in FLAGS), None)
        value = "" if flag is None else environ.get(name_variable(flag), "")
        if flag is None or not value or action.nargs == 0 or (resumes and flag not in _OF_THE_CALL):
            continue
        try:
            action.default = _convert(action, value)
        except (argparse.ArgumentTypeError, ValueError) as error:
            problems.append(Problem(where=name_variable(flag), what=str(error)))
    if problems:
        raise InputError("the environment has a default that its flag does not take", tuple(problems))


def find_misspelt(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that nothing reads, and what may have been meant."""
    known = {name.removeprefix(_PREFIX) for name in (*OTHERS, *map(name_variable, FLAGS))}
    strangers = [name for name in environ if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in known]
    if not strangers:
        return
    from launcher.manifest.spelling import closest

    for name in strangers:
        if (meant := closest(name.removeprefix(_PREFIX), known)) is not None:
            yield name, f"{_PREFIX}{meant}"


def _find_actions(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[argparse.Action]:
    """Of the verb, and of its part where it has parts."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = action.choices.get(words[0]) if words else None
            if inner is not None:
                yield from _find_actions(inner, words[1:])
        else:
            yield action


def _convert(action: argparse.Action, value: str) -> object:
    made = action.type(value) if callable(action.type) else value
    if action.choices is not None and made not in action.choices:
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, action.choices))}")
    return made
