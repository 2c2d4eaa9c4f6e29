"""docs/CLI.md: every command and flag, from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.cli.environment import FLAGS, name_variable
from launcher.cli.main import make_parser
from launcher.core.errors import ExitCode

EXIT_CODES: Mapping[int, str] = {
    ExitCode.DONE: "done",
    ExitCode.BUG: "a bug in the launcher",
    ExitCode.WRONG_INPUT: "wrong input: arguments, manifest, files",
    ExitCode.DOES_NOT_FIT: "does not fit the hardware; the message says what would fit",
    ExitCode.RUN_FAILED: "the run failed or died; `outcome.json` and `logs/console.log` say why",
    ExitCode.WRONG_TOPOLOGY: "the started processes, or the nodes, differ from the plan; every difference is listed",
    ExitCode.QUALITY_GATE: "`launcher eval --against`, `launcher regression`: the quality gate failed",
    ExitCode.DOCTOR_FOUND_SOMETHING: "`launcher doctor` found a problem",
    ExitCode.PREEMPTED: "stopped by a signal after finishing and saving the step; continue with `--resume`",
    130: "interrupted while there is nothing to save (for example Ctrl-C while planning)",
}
VARIABLES: Mapping[str, str] = {
    "LAUNCHER_DATA_DIR": "parent folder of `datasets_optimized/`, the prepared data (default: the working directory)",
    "LAUNCHER_MODELS_DIR": "folder that is searched for base models before the Hugging Face cache",
    "LAUNCHER_CACHE_DIR": "history of runs on this machine: `experience.json`, `calibration.json`; `templates/`: chat "
    "templates that passed their check (default: `expert-launcher` in `XDG_CACHE_HOME` or `~/.cache`)",
    "LAUNCHER_CALIBRATION": "path of `calibration.json`, or `off`",
    "LAUNCHER_HARDWARE": "path of [hardware.json](#your-hardware), or `off`",
    "LAUNCHER_NODE_DIR": "folder with the judges' `node_modules` (default: `quality-node` in the virtual environment)",
    "LAUNCHER_TRUST": "`1`: as `--trust`, see [SECURITY.md](SECURITY.md#code-from-manifests-and-run-directories)",
    "LAUNCHER_LOG_LEVEL": "`debug`, `info` (default), `warning` or `error`: which messages are shown on stderr",
    "WANDB_MODE": "`online`, `offline` or `disabled`; `WANDB_API_KEY`, `WANDB_PROJECT`, `WANDB_ENTITY` and "
    "`WANDB_BASE_URL` also apply",
    "HF_HOME": "the Hugging Face cache; `HF_HUB_CACHE`, `HF_DATASETS_CACHE`, `HF_TOKEN` and `HF_HUB_OFFLINE` "
    "also apply",
    "CUDA_VISIBLE_DEVICES": "GPUs to plan for and use; empty: none",
    "NO_COLOR": "no colors; `COLUMNS` sets the width of tables (at least 60)",
}
_HEADER = """# Command line

Generated from the parsers by `python -m tools.docs`; `make check` verifies it. `launcher COMMAND --help` is the same.
After the first `make`, `launcher` is in `.venv/bin`; `python -m launcher` is equivalent.

Results go to stdout, everything else to stderr. With `--json`, errors are also JSON:
`{"error": ..., "problems": [{"where": ..., "what": ...}], "hint": ...}`.
"""

_HARDWARE = """## Your hardware

`hardware.json` overrides the GPU catalogue and the hardware probe. It is in the folder `expert-launcher` of
`XDG_CONFIG_HOME` or `~/.config`. The plan shows which values it used.

```json
{
  "price_per_gpu_hour": 0.5,
  "currency": "EUR",
  "network_gb_per_second": 12.5,
  "this_machine": {"free_vram_gib": 20, "cpu_cores": 8, "ram_gib": 48},
  "gpus": {
    "rtx4090": {"price_per_gpu_hour": 0.4, "interconnect": "pcie-p2p", "interconnect_gb_per_second": 25},
    "rtx2080ti": {
      "title": "NVIDIA GeForce RTX 2080 Ti",
      "memory_mib": 11264,
      "tflops": 53.8,
      "memory_gb_per_second": 616,
      "compute_capability": "7.5"
    }
  }
}
```
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    name: str
    parser: argparse.ArgumentParser


def render_command_line() -> str:
    commands = list(_list_commands(make_parser(), "launcher"))
    shared = _collect_shared(commands)
    parts = [_HEADER, _render_overview(commands), _render_exit_codes(), _render_variables(), _HARDWARE]
    parts += [_render_command(command, shared) for command in commands]
    parts += [f"## Shared: {_short(title)}\n\n{_render_flags(flags)}" for title, flags in shared.items()]
    return "\n".join(parts)


def _list_commands(parser: argparse.ArgumentParser, name: str) -> Iterator[_Command]:
    """Yield all commands; a command with subcommands is represented by them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from _list_commands(inner, f"{name} {word}")
            return
    yield _Command(name=name, parser=parser)


def _list_groups(command: _Command) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yield our own argument groups; all other arguments are in the group ""."""
    default_titles = {"positional arguments", "options"}
    ungrouped: list[argparse.Action] = []
    for group in command.parser._action_groups:
        visible = [a for a in group._group_actions if a.help != argparse.SUPPRESS and a.dest != "help"]
        if group.title is None or group.title in default_titles:
            ungrouped += visible
        elif visible:
            yield group.title, visible
    if ungrouped:
        yield "", ungrouped


def _collect_shared(commands: list[_Command]) -> dict[str, list[argparse.Action]]:
    """Return the groups that several commands have in identical form."""
    rendered: dict[str, list[str]] = {}
    actions: dict[str, list[argparse.Action]] = {}
    for command in commands:
        for title, group in _list_groups(command):
            if title:
                rendered.setdefault(title, []).append(_render_flags(group))
                actions.setdefault(title, group)
    return {title: actions[title] for title, texts in rendered.items() if len(texts) > 1 and len(set(texts)) == 1}


def _render_overview(commands: list[_Command]) -> str:
    rows = (f"| [`{command.name}`](#{_anchor(command.name)}) | {_describe(command)} |" for command in commands)
    return "\n".join(["## Commands\n", "| command | description |", "|---|---|", *rows, ""])


def _render_command(command: _Command, shared: Mapping[str, list[argparse.Action]]) -> str:
    lines = [f"## {command.name}\n", f"{_describe(command)[0].upper()}{_describe(command)[1:]}.\n"]
    groups = sorted(_list_groups(command), key=lambda group: group[0] != "")
    for title, actions in groups:
        if title not in shared:
            lines += [f"**{title[0].upper()}{title[1:]}**\n"] if title else []
            lines.append(_render_flags(actions))
    links = [f"[{_short(title)}](#{_anchor(f'shared: {_short(title)}')})" for title, _ in groups if title in shared]
    if links:
        lines.append(f"Also the flags of {', '.join(links)}.\n")
    elif not groups:
        lines.append("No arguments.\n")
    if command.parser.epilog:
        lines.append(f"```text\n{command.parser.epilog.strip()}\n```\n")
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
    note = "accelerate returns 1 for every failure; `launcher train` returns the actual code.\n"
    return "\n".join(["## Exit codes\n", "| code | meaning |", "|---|---|", *rows, "", note])


def _render_variables() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    defaults = [f"| `{name_variable(flag)}` | `{flag}` | {meaning} |" for flag, meaning in FLAGS.items()]
    head = ["## Environment variables\n", "| variable | meaning |", "|---|---|"]
    flags = ["Defaults of flags; the command line overrides them:\n", "| variable | flag | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows, "", *flags, *defaults, ""])


def _describe(command: _Command) -> str:
    return (command.parser.description or "").strip().replace("|", "&#124;")


def _short(title: str) -> str:
    return title.partition(" (")[0]


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub generates for a heading."""
    anchor = "".join(char for char in heading.lower() if char.isalnum() or char in " -_")
    return anchor.replace(" ", "-")
