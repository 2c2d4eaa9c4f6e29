"""`launcher COMMAND …`: imports the module of the verb, runs it, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Protocol

from launcher import __version__
from launcher.cli.broken_pipe import close_output, tolerate_broken_pipes
from launcher.cli.environment import apply_environment, find_actions, find_misspelt, name_cause
from launcher.core.errors import ExitCode, InputError, LauncherError
from launcher.core.installation import explain_missing_module, find_page
from launcher.core.log import configure, get_logger

log = get_logger(__name__)

# Each verb is a module of this package with add_arguments() and run(), imported only when the verb is called.
VERBS = {
    "new": "create an expert from your rows: writes a commented manifest, shows one row's loss mask and the plan",
    "validate": "check a manifest and list the keys that training does not use",
    "plan": "show how an expert would be trained on this or other hardware, and why",
    "prepare": "tokenize, audit and pack an expert's data; cached",
    "data": "list cached datasets and prepared data; delete stale ones, move stores to a faster disk",
    "train": "train an expert: plan, prepare its data, write its run directory, run it",
    "sweep": "search hyperparameters with Optuna: one run per trial, within a budget; the same command continues it",
    "rehearse": "run a few steps of a cluster's plan and configs on CPU ranks of this machine, with a tiny base model",
    "ask": "ask a trained expert one question",
    "eval": "judge an expert's answers to test rows; --against adds a quality gate",
    "regression": "train the old and the optimized configuration on the same rows; compare quality and speed",
    "export": "write a run's model for others: merged, as GGUF or as adapter; verify it; push it to the hub",
    "bench": "measure: compare settings (--vary), what each optimization contributes (ablation), or attention backends",
    "doctor": "diagnose this machine, an expert's plan on it, or a run",
    "report": "print a run's report: configuration, reasons, results, and how to reproduce it",
    "dashboard": "create or update the W&B workspace; without a network, write its specification to a file",
    "compare": "compare runs as one HTML page: curves, metrics, settings and caveats",
    "schema": "print the JSON Schema of a manifest, for editors",
    "completion": "print a script that completes this command in bash, zsh or tcsh",
}

_DESCRIPTION = (
    "Turns an expert manifest into a plan, and the plan into accelerate, DeepSpeed and FSDP2 configs and a run."
)
_EPILOG = """\
exit codes: 0 success, 1 bug in launcher, 2 wrong input, 3 does not fit the hardware, 4 run failed,
5 started processes do not match the plan, 6 quality gate failed, 7 doctor found problems,
75 interrupted, resumable, 130 interrupted

LAUNCHER_<FLAG> sets the default of a flag (LAUNCHER_RUNS_DIR, LAUNCHER_PROFILE, ...), LAUNCHER_LOG_LEVEL the level of
messages, and hardware.json in ~/.config/expert-launcher describes your hardware: {page}
"""

# Extras that verbs need besides the base dependencies, if not `train`.
_EXTRAS = {"new": "data", "prepare": "data", "data": "data", "sweep": "train,sweep"}

# Verbs that load a base model or judge answers, or call those that do.
_TRUSTING = ("prepare", "train", "sweep", "rehearse", "ask", "eval", "regression", "export", "doctor")

# What the file system or its permissions forbid is the user's to fix, wherever it is raised.
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG)
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Verb(Protocol):
    """Interface of a module that implements a verb of the command line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add positional arguments and flags."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the verb and return its exit code."""


_ARGUMENTS = ("arguments", "commands")


class _UsageError(SystemExit):
    """SystemExit for a usage error that argparse has found, with the message as an InputError in `error`."""

    def __init__(self, message: str, parser: argparse.ArgumentParser, *, hint: str = "", is_verb: bool = False) -> None:
        super().__init__(int(ExitCode.WRONG_INPUT))
        self.parser = parser
        self.is_verb = is_verb  # there is no such verb, so its flags cannot be judged
        self.lacks_command = message == "the following arguments are required: COMMAND"
        self.error = InputError(
            f"{parser.prog}: {message}",
            hint=hint or f"{parser.prog} --help lists its {_ARGUMENTS[parser.prog == 'launcher']}",
        )


class _Parser(argparse.ArgumentParser):
    _is_intermixed = False
    _words: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a command line, also with flags between its positional arguments: RUN --runs-dir DIR QUESTION.

        argparse takes an optional argument as missing if a flag precedes it, and returns its word as unknown.
        """
        words = self._words = list(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(words, namespace)
        is_verb = all(action.nargs != argparse.PARSER for action in self._actions)
        if self._is_intermixed or not is_verb or not unknown or any(word.startswith("-") for word in unknown):
            return found, unknown
        self._is_intermixed = True
        try:
            return self.parse_known_intermixed_args(words)
        finally:
            self._is_intermixed = False

    def error(self, message: str) -> NoReturn:
        """Raise a usage error without argparse's usage text, which is long for a verb with many flags."""
        if (word := re.match(r"argument COMMAND: invalid choice: '([^']*)'", message)) is not None:
            from launcher.manifest.suggest import find_closest

            other = _OTHER_VERBS.get(word[1].lower().replace("_", "-"))
            meant = None if other else find_closest(word[1], VERBS)
            message = f"no command {word[1]!r}" + (f"; did you mean {meant}?" if meant else "")
            hint = f"write launcher {other}" if other else ""
            raise _UsageError(message, self, hint=hint or ("" if meant else self._reorder(word[1])), is_verb=True)
        raise _UsageError(message, self)

    def _reorder(self, first: str) -> str:
        """Return a hint with the verb first for a command line such as `launcher neo4j train`; empty if it has none."""
        verb = next((word for word in self._words if word in VERBS), None)
        if verb is None:
            return ""
        rest = list(self._words)
        rest.remove(verb)
        return f"write {shlex.join(['launcher', verb, *rest])}" if rest[:1] == [first] else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write a message and, unlike argparse, raise the errors of the stream."""
        if message:
            (file or sys.stderr).write(message)


def make_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser with the arguments of all verbs or, given a command line, only with those of its verb."""
    parser = _Parser(
        prog="launcher",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(page=find_page("CLI.md")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"expert-launcher {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    chosen = list(VERBS) if words is None else [word for word in words if word in VERBS][:1]
    for name, summary in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        if name in chosen:
            _load(name).add_arguments(verb)
            if name in _TRUSTING:
                from launcher.request.arguments import add_trust_argument

                add_trust_argument(verb)
    return parser


def _load(name: str) -> Verb:
    verb: Verb = import_module(f"launcher.cli.{name}")
    return verb


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if sys.stderr is None:  # its descriptor is closed
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  (lives as long as the process)
    configure()
    if not _has_stdout():
        return int(ExitCode.WRONG_INPUT)
    try:
        with tolerate_broken_pipes():
            code = _run(argv)
            sys.stdout.flush()
        return code
    except OSError as error:
        if error.filename is not None and error.errno in _FORBIDDEN:
            log.error(f"{error.filename}: {error.strerror}")
            return int(ExitCode.WRONG_INPUT)
        if not _has_working_directory():
            log.error("the working directory was deleted: change to another one")
            return int(ExitCode.WRONG_INPUT)
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:  # not of a stream: our bug
            raise
        close_output(sys.stdout)
        log.error(f"the output cannot be written: {error.strerror}")
        return int(ExitCode.WRONG_INPUT)
    except KeyboardInterrupt:
        log.info("interrupted")
        return 130


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["bench"]:
            from launcher.cli.bench import complete

            words = complete(words)
        parser = make_parser(words)
        for name, suggestion in find_misspelt(os.environ):
            log.warning(f"unknown environment variable {name}; did you mean {suggestion}?")
        apply_environment(parser, words, os.environ)
        options = {name: action for action in find_actions(parser, words) for name in action.option_strings}
        try:
            arguments, unknown = parser.parse_known_args(words)
        except _UsageError as end:  # a wrong flag may be the reason why a required one is missing
            unknown = [word for word in words if _is_unknown(word, options)]
            if end.lacks_command and not unknown:
                end.parser.print_help(sys.stderr)
                return int(ExitCode.WRONG_INPUT)
            raise _explain_unknown(options, unknown, words) if unknown and not end.is_verb else end.error from None
        if unknown:
            raise _explain_unknown(options, unknown, words)
    except LauncherError as error:
        return _report(error, words[:1], is_json="--json" in words)
    except SystemExit as end:  # after --help or a usage message
        return end.code if isinstance(end.code, int) else int(ExitCode.WRONG_INPUT)
    if getattr(arguments, "trust", False):
        from launcher.manifest.trust import grant_trust

        grant_trust()
    try:
        return int(_load(arguments.verb).run(arguments))
    except LauncherError as error:
        name_cause(error, words, os.environ)
        return _report(error, [arguments.verb], is_json=getattr(arguments, "json", False))
    except ModuleNotFoundError as missing:
        what = f"launcher {arguments.verb}"
        explained = explain_missing_module(missing, what, _EXTRAS.get(arguments.verb, "train"))
        if explained is None:
            raise
        return _report(explained, [arguments.verb], is_json=getattr(arguments, "json", False))


_DATA_NAMES = ("csv", "jsonl", "json_file", "file", "input", "train", "rows", "dataset", "dataset_name", "train_file")
# Names of other programs for flags that have another name here, which may depend on the verb.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("model", "base_model", "model_name", "model_name_or_path"), ("--base NAME",)),
    **dict.fromkeys(("steps", "num_steps"), ("--max-steps N",)),
    **dict.fromkeys(("gpu_count", "num_gpus"), ("--gpus N",)),
    **dict.fromkeys(_DATA_NAMES, ("--data FILE", "--set training.dataset.path=FILE")),
    **dict.fromkeys(("full", "full_finetune", "full_finetuning"), ("--set training.config.adapter_type=full",)),
    **dict.fromkeys(("load_in_4bit", "qlora", "use_qlora"), ("--set base_models.0.quantization=int4",)),
    **dict.fromkeys(("deepspeed", "fsdp"), ("--strategy NAME",)),
    **dict.fromkeys(("output_dir", "logging_dir"), ("--runs-dir DIR",)),
    "resume_from_checkpoint": ("--resume RUN",),
}
# Names of other programs for verbs that have another name here.
_OTHER_VERBS = {
    **dict.fromkeys(("init", "create", "add"), "new EXPERT --data FILE"),
    **dict.fromkeys(("finetune", "fine-tune", "sft", "run", "start", "launch", "fit"), "train EXPERT"),
    **dict.fromkeys(("resume", "continue"), "train --resume RUN"),
    **dict.fromkeys(("generate", "chat", "infer", "inference", "predict"), "ask RUN"),
    **dict.fromkeys(("evaluate", "test", "judge"), "eval EXPERT --run RUN"),
    **dict.fromkeys(("merge", "merge-lora", "push"), "export RUN"),
    **dict.fromkeys(("preprocess", "tokenize", "pack"), "prepare EXPERT"),
    **dict.fromkeys(("check", "lint"), "validate EXPERT"),
    **dict.fromkeys(("estimate", "simulate"), "plan EXPERT"),
    **dict.fromkeys(("cache", "datasets"), "data"),
    "help": "--help",
    "version": "--version",
    **dict.fromkeys(("tune", "search", "hpo"), "sweep EXPERT --param NAME=VALUES"),
}
# Flags of launcher 0.1.
_RENAMED = {
    "--slurm": "--on slurm",
    "--no-submit": "--dry-run",
    "--allow-drift": "--allow-changed-inputs",
    "--max-bad-steps": "--max-nonfinite-steps",
    "--max-drop": "--max-regression",
    "--into": "--output-dir",
}


_Options = Mapping[str, argparse.Action]


def _is_unknown(word: str, options: _Options) -> bool:
    """Whether a word is a flag that is neither one of a verb's flags nor an abbreviation of one."""
    is_flag = word.startswith("--") and len(word) > 2 and " " not in word
    return is_flag and not any(option.startswith(word.partition("=")[0]) for option in options)


def _explain_unknown(options: _Options, unknown: Sequence[str], words: Sequence[str]) -> InputError:
    """Return the error for unknown flags of a verb; its hint suggests similar flags, or --set for a manifest key."""
    verb = " ".join(["launcher", *(word for word in words[:1] if word in VERBS)])
    hints, meant = [], []
    flags = [word for word in unknown if word.startswith("--") and len(word) > 2]
    for flag in flags:
        from launcher.manifest.model import Manifest
        from launcher.manifest.problems import find_key, is_switch
        from launcher.manifest.suggest import find_closest

        name, equals, value = flag.partition("=")
        if name in _RENAMED:
            hints.append(_RENAMED[name])
            continue
        others = _OTHER_NAMES.get(name.removeprefix("--").replace("-", "_"), ())
        own = next((other for other in others if other.partition(" ")[0] in options), None)
        if own is not None and options[own.partition(" ")[0]].nargs != 0:
            hints.append(own)
            continue
        key = find_key(name.removeprefix("--").replace("-", "_"), Manifest) if "--set" in options else None
        if key is None and (closest := find_closest(name, options)) is not None:
            meant.append(closest)
        if key is not None:
            following = words[words.index(flag) + 1 :][:1]
            if not equals and is_switch(key, Manifest):
                value = "true" if following not in (["false"], ["False"]) else "false"
            elif not equals:
                value = next((word for word in following if not word.startswith("--")), "VALUE")
            hints.append(f"--set {key}={value}")
    if "--set" in options:
        hints += _complete_overrides(unknown)
    texts = [f"write {' '.join(hints)}"] if hints else []
    texts += [f"did you mean {' '.join(meant)}?"] if meant else []
    return InputError(
        f"{verb}: unrecognized arguments: {' '.join(unknown)}",
        hint="; ".join(texts) or f"{verb} --help lists its arguments",
    )


def _complete_overrides(unknown: Sequence[str]) -> Iterator[str]:
    """Yield --set for words such as `lr=1e-4`, which name a key of the manifest."""
    from launcher.manifest.model import Manifest
    from launcher.manifest.problems import find_key

    for word in unknown:
        name, equals, value = word.partition("=")
        if equals and name and not name.startswith("-"):
            key = find_key(name.rpartition(".")[2], Manifest)
            if key is not None:
                yield f"--set {shlex.quote(f'{key}={value}')}"


def _report(error: LauncherError, verb: Sequence[str], *, is_json: bool) -> int:
    if is_json:
        problems = [{"where": problem.where, "what": problem.what} for problem in error.problems]
        content: dict[str, object] = {"valid": False} if list(verb) == ["validate"] else {}
        content |= {"error": error.title, "problems": problems, "hint": error.hint}
        from launcher.cli.tables import print_json

        print_json(content)
    sys.stdout.flush()
    log.error(error)
    return int(error.exit_code)


def _has_working_directory() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _has_stdout() -> bool:
    """Return whether stdout is open, and make it replace characters that it cannot encode."""
    if sys.stdout is None:
        log.error("the output cannot be written: stdout is closed")
        return False
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return True
