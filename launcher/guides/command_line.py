"""docs/CLI.md: every verb and flag, from the parsers themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.cli.environment import FLAGS, name_variable
from launcher.cli.main import make_parser
from launcher.errors import ExitCode

EXIT_CODES: Mapping[int, str] = {
    ExitCode.DONE: "done",
    ExitCode.BUG: "a bug of ours",
    ExitCode.WRONG_INPUT: "wrong input: arguments, manifest, files",
    ExitCode.DOES_NOT_FIT: "does not fit the hardware; the message says what would",
    ExitCode.RUN_FAILED: "the run failed or died; `outcome.json` and `logs/console.log` say why",
    ExitCode.WRONG_TOPOLOGY: "what accelerate started is not what was planned; every difference is listed",
    ExitCode.QUALITY_GATE: "`launcher eval --against`, `launcher regression`: the expert has become worse",
    ExitCode.DOCTOR_FOUND_SOMETHING: "`launcher doctor` found something wrong",
    ExitCode.PREEMPTED: "stopped by a signal: the step was finished and saved; `--resume` goes on. "
    "`launcher bench memory`: the time is over, start it again",
    130: "interrupted where nothing is to be saved (Ctrl-C while planning, say)",
}
VARIABLES: Mapping[str, str] = {
    "LAUNCHER_DATA_DIR": "where prepared data lies, in `datasets_optimized/` below it (default: the working folder)",
    "LAUNCHER_MODELS_DIR": "where base models are looked for as folders, before the Hugging Face cache",
    "LAUNCHER_CACHE_DIR": "what runs of this machine have taught: `experience.json`, `calibration.json` (default: "
    "`expert-launcher` in `XDG_CACHE_HOME` or `~/.cache`)",
    "LAUNCHER_CALIBRATION": "another file than `calibration.json`, or `off`",
    "LAUNCHER_HARDWARE": "another file than [hardware.json](#your-hardware), or `off`",
    "LAUNCHER_NODE_DIR": "the folder with the judges' `node_modules` (default: `quality-node` in the environment)",
    "WANDB_MODE": "`online`, `offline` or `disabled`; `WANDB_API_KEY`, `WANDB_PROJECT`, `WANDB_ENTITY` and "
    "`WANDB_BASE_URL` count too",
    "HF_HOME": "the Hugging Face cache; `HF_HUB_CACHE`, `HF_DATASETS_CACHE`, `HF_TOKEN` and `HF_HUB_OFFLINE` count too",
    "CUDA_VISIBLE_DEVICES": "the GPUs that are planned for and used; empty: none",
    "NO_COLOR": "no colours; `COLUMNS` sets the width of tables, from 60 on",
}
_HEAD = """# The command line

Made from the parsers by `python -m launcher.guides`; `make check` holds it. `launcher VERB --help` says the same.
`launcher` lies in `.venv/bin` behind the first `make`; `python -m launcher` does the same.

Data goes to stdout, everything else to stderr. With `--json` a failure is JSON too:
`{"error": ..., "problems": [{"where": ..., "what": ...}], "hint": ...}`.
"""

_HARDWARE = """## Your hardware

What you know better than the catalogue and the probe stands in `hardware.json`, in `expert-launcher` of
`XDG_CONFIG_HOME` or `~/.config`. It changes what a plan is made for, and the plan says so.

```json
{
  "price_per_gpu_hour": 0.5,
  "network_gb_per_second": 12.5,
  "this_machine": {"free_vram_gib": 20, "cpu_cores": 8, "ram_gib": 48},
  "gpus": {
    "rtx4090": {"price_per_gpu_hour": 0.4, "interconnect": "pcie-p2p", "interconnect_gb_per_second": 25},
    "rtx4070laptop": {
      "title": "NVIDIA GeForce RTX 4070 Laptop GPU",
      "memory_mib": 8188,
      "tflops": 30,
      "memory_gb_per_second": 256,
      "compute_capability": "8.9"
    }
  }
}
```
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verb:
    name: str
    parser: argparse.ArgumentParser


def render_command_line() -> str:
    verbs = list(_list_verbs(make_parser(), "launcher"))
    shared = _find_shared(verbs)
    parts = [_HEAD, _render_overview(verbs), _render_exit_codes(), _render_variables(), _HARDWARE]
    parts += [_render_verb(verb, shared) for verb in verbs]
    parts += [f"## Shared: {_short(title)}\n\n{_render_flags(flags)}" for title, flags in shared.items()]
    return "\n".join(parts)


def _list_verbs(parser: argparse.ArgumentParser, name: str) -> Iterator[_Verb]:
    """Those that can be typed: a verb with sub-verbs is told by them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from _list_verbs(inner, f"{name} {word}")
            return
    yield _Verb(name=name, parser=parser)


def _list_groups(verb: _Verb) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Groups with a title of our own; "" holds the rest."""
    own = {"positional arguments", "options"}
    loose: list[argparse.Action] = []
    for group in verb.parser._action_groups:
        shown = [a for a in group._group_actions if a.help != argparse.SUPPRESS and a.dest != "help"]
        if group.title is None or group.title in own:
            loose += shown
        elif shown:
            yield group.title, shown
    if loose:
        yield "", loose


def _find_shared(verbs: list[_Verb]) -> dict[str, list[argparse.Action]]:
    """Groups that several verbs have, word for word."""
    seen: dict[str, list[str]] = {}
    actions: dict[str, list[argparse.Action]] = {}
    for verb in verbs:
        for title, group in _list_groups(verb):
            if title:
                seen.setdefault(title, []).append(_render_flags(group))
                actions.setdefault(title, group)
    return {title: actions[title] for title, texts in seen.items() if len(texts) > 1 and len(set(texts)) == 1}


def _render_overview(verbs: list[_Verb]) -> str:
    rows = (f"| [`{verb.name}`](#{_anchor(verb.name)}) | {_told(verb)} |" for verb in verbs)
    return "\n".join(["## Verbs\n", "| verb | what it does |", "|---|---|", *rows, ""])


def _render_verb(verb: _Verb, shared: Mapping[str, list[argparse.Action]]) -> str:
    lines = [f"## {verb.name}\n", f"{_told(verb)[0].upper()}{_told(verb)[1:]}.\n"]
    groups = sorted(_list_groups(verb), key=lambda group: group[0] != "")
    for title, actions in groups:
        if title not in shared:
            lines += [f"**{title[0].upper()}{title[1:]}**\n"] if title else []
            lines.append(_render_flags(actions))
    links = [f"[{_short(title)}](#{_anchor(f'shared: {_short(title)}')})" for title, _ in groups if title in shared]
    if links:
        lines.append(f"Also the flags of {', '.join(links)}.\n")
    elif not groups:
        lines.append("No arguments.\n")
    if verb.parser.epilog:
        lines.append(f"```text\n{verb.parser.epilog.strip()}\n```\n")
    return "\n".join(lines)


def _render_flags(actions: list[argparse.Action]) -> str:
    rows = (f"| {_render_name(action)} | {_render_help(action)} |" for action in actions)
    return "\n".join(["| argument | meaning |", "|---|---|", *rows, ""])


def _render_name(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _render_value(action)
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{f'{flag} {value}'.strip()}`" for flag in action.option_strings)


def _render_value(action: argparse.Action) -> str:
    if action.choices is not None:
        value = "/".join(map(str, action.choices))
    else:
        value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    forms = {"?": f"[{value}]", "*": f"[{value} …]", "+": f"{value} …"}
    return forms.get(str(action.nargs), value)


def _render_help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%").replace("|", "&#124;").replace("<", "&lt;")
    if action.default not in (None, False, "", []) and "default" not in text and action.option_strings:
        text += f" (default {action.default})"
    return f"{text}; may be repeated" if isinstance(action, argparse._AppendAction) else text


def _render_exit_codes() -> str:
    rows = (f"| {int(code)} | {meaning} |" for code, meaning in EXIT_CODES.items())
    note = "accelerate turns every code into 1; `launcher train` returns the real one.\n"
    return "\n".join(["## Exit codes\n", "| code | meaning |", "|---|---|", *rows, "", note])


def _render_variables() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    defaults = [f"| `{name_variable(flag)}` | `{flag}` | {meaning} |" for flag, meaning in FLAGS.items()]
    head = ["## Environment variables\n", "| variable | meaning |", "|---|---|"]
    flags = ["Defaults of flags, which the command line wins over:\n", "| variable | flag | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows, "", *flags, *defaults, ""])


def _told(verb: _Verb) -> str:
    return (verb.parser.description or "").strip().replace("|", "&#124;")


def _short(title: str) -> str:
    return title.partition(" (")[0]


def _anchor(heading: str) -> str:
    """As GitHub makes them."""
    kept = "".join(char for char in heading.lower() if char.isalnum() or char in " -_")
    return kept.replace(" ", "-")
