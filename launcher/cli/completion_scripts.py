"""The scripts for bash, zsh and fish. Each is static: completing starts no Python."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from launcher.cli.completion_words import Flag, Values, Verb

# Experts lie in the working directory, or came with the package; runs where LAUNCHER_RUNS_DIR says.
_SHIPPED = "json neo4j sql typescript"

_BASH_HEAD = f"""\
# bash completion of launcher; made by `launcher completion bash`
_launcher_experts() {{
  local file
  for file in experts/*/manifest.json; do [[ -f $file ]] && file=${{file%/manifest.json}} && echo "${{file##*/}}"; done
  printf '%s\n' {_SHIPPED}
}}
_launcher_runs() {{
  local file
  for file in "${{LAUNCHER_RUNS_DIR:-runs}}"/*/plan.json; do
    [[ -f $file ]] && file=${{file%/plan.json}} && echo "${{file##*/}}"
  done
}}
_launcher() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
  local verb=${{COMP_WORDS[1]}} part=${{COMP_WORDS[2]}}
  COMPREPLY=()
  if [[ $cur == "=" ]]; then cur=""; elif [[ $prev == "=" ]]; then prev=${{COMP_WORDS[COMP_CWORD-2]}}; fi
"""
_BASH_TAIL = """\
}
complete -o filenames -F _launcher launcher
"""


def render_bash(verbs: Sequence[Verb]) -> str:
    firsts = _first_names(verbs)
    lines = [
        f"  if ((COMP_CWORD == 1)); then COMPREPLY=($(compgen -W {_quote(' '.join([*firsts, '--version', '--help']))} "
        '-- "$cur")); return; fi',
        *(f"  {line}" for line in _bash_parts(verbs)),
        '  case "$verb" in',
    ]
    for verb in verbs:
        lines.append(f"    {_quote(verb.name)})")
        lines.append('      case "$prev" in')
        for names, values in _by_values(verb.flags):
            lines.append(f"        {'|'.join(names)}) {_bash_values(values)}; return ;;")
        lines.append("      esac")
        flags = _quote(" ".join(name for flag in verb.flags for name in flag.names))
        lines.append(f'      if [[ $cur == -* ]]; then COMPREPLY=($(compgen -W {flags} -- "$cur"))')
        lines.append(f"      else {_bash_values(verb.values)}; fi ;;")
    lines.append("  esac")
    return _BASH_HEAD + "\n".join(lines) + "\n" + _BASH_TAIL


def _bash_parts(verbs: Sequence[Verb]) -> Iterator[str]:
    """A verb with parts: the part is a word of its own, and the first of them may be left out."""
    for first, parts in _parts(verbs).items():
        words = _quote(" ".join(parts))
        yield f"if [[ $verb == {first} ]]; then"
        yield f'  if ((COMP_CWORD == 2)) && [[ $cur != -* ]]; then COMPREPLY=($(compgen -W {words} -- "$cur") '
        yield '    $(compgen -W "$(_launcher_experts | sort -u)" -- "$cur")); return; fi'
        yield f'  case "$part" in {"|".join(parts)}) verb="$verb $part" ;; *) verb="$verb {parts[0]}" ;; esac'
        yield "fi"


def _bash_values(values: Values) -> str:
    made = {
        "words": f"-W {_quote(' '.join(values.words))}",
        "file": "-f",
        "folder": "-d",
        "run": '-d -W "$(_launcher_runs)"',
    }
    if values.kind == "expert":  # by name, or a folder or a manifest
        names = 'compgen -d -W "$(_launcher_experts | sort -u)" -- "$cur"'
        return f"""COMPREPLY=($({names}) $(compgen -f -X '!*.json' -- "$cur"))"""
    return f'COMPREPLY=($(compgen {made[values.kind]} -- "$cur"))' if values.kind in made else ":"


_ZSH_HEAD = f"""\
#compdef launcher
# zsh completion of launcher; made by `launcher completion zsh`
_launcher_experts() {{
  local -a found
  found=(experts/*/manifest.json(N:h:t) {_SHIPPED})
  compadd -- $found; _files
}}
_launcher_runs() {{
  local -a found
  found=(${{LAUNCHER_RUNS_DIR:-runs}}/*/plan.json(N:h:t))
  compadd -- $found; _files -/
}}
_launcher() {{
  local cur=${{words[CURRENT]}} prev=${{words[CURRENT-1]}} verb=${{words[2]}} part=${{words[3]}}
  local -a flags verbs
"""
_ZSH_TAIL = """\
}
if [[ ${funcstack[1]} == _launcher ]]; then _launcher "$@"; else compdef _launcher launcher; fi
"""


def render_zsh(verbs: Sequence[Verb]) -> str:
    told = _first_told(verbs)
    lines = ["  if ((CURRENT == 2)); then", "    verbs=("]
    lines += [f"      {_quote(f'{name}:{text}')}" for name, text in told.items()]
    lines += ["    )", "    _describe verb verbs; compadd -- --version --help; return", "  fi"]
    for first, parts in _parts(verbs).items():
        lines.append(f"  if [[ $verb == {first} ]]; then")
        both = f"compadd -- {' '.join(parts)}; _launcher_experts"
        lines.append(f"    if ((CURRENT == 3)) && [[ $cur != -* ]]; then {both}; return; fi")
        lines.append(f'    case $part in {"|".join(parts)}) verb="$verb $part" ;; *) verb="$verb {parts[0]}" ;; esac')
        lines.append("  fi")
    lines.append("  case $verb in")
    for verb in verbs:
        lines.append(f"    {_quote(verb.name)})")
        lines.append("      case $prev in")
        for names, values in _by_values(verb.flags):
            lines.append(f"        {'|'.join(names)}) {_zsh_values(values)}; return ;;")
        lines.append("      esac")
        lines.append("      flags=(")
        lines += [f"        {_quote(f'{name}:{flag.told}')}" for flag in verb.flags for name in flag.names]
        lines.append("      )")
        lines.append(f"      if [[ $cur == -* ]]; then _describe -o flag flags; else {_zsh_values(verb.values)}; fi ;;")
    lines.append("  esac")
    return _ZSH_HEAD + "\n".join(lines) + "\n" + _ZSH_TAIL


def _zsh_values(values: Values) -> str:
    made = {
        "words": f"compadd -- {' '.join(map(_quote, values.words))}",
        "file": "_files",
        "folder": "_files -/",
        "expert": "_launcher_experts",
        "run": "_launcher_runs",
    }
    return made.get(values.kind, ":")


_FISH_HEAD = f"""\
# fish completion of launcher; made by `launcher completion fish`
function __launcher_experts
    for file in experts/*/manifest.json
        path basename (path dirname $file)
    end
    printf '%s\\n' {_SHIPPED}
end
function __launcher_runs
    set -l folder runs
    set -q LAUNCHER_RUNS_DIR; and set folder $LAUNCHER_RUNS_DIR
    for file in $folder/*/plan.json
        path basename (path dirname $file)
    end
end
function __launcher_at
    set -l words (commandline -opc)
    test (count $words) -ge 2; and test "$words[2]" = "$argv[1]"; or return 1
    test (count $argv) -eq 1; and return 0
    set -l part $argv[3]
    test (count $words) -ge 3; and contains -- "$words[3]" $argv[3..]; and set part $words[3]
    test "$part" = "$argv[2]"
end
function __launcher_first
    test (count (commandline -opc)) -eq $argv[1]
end
complete -c launcher -f
complete -c launcher -n '__launcher_first 1' -l version -d 'print the version'
"""


def render_fish(verbs: Sequence[Verb]) -> str:
    parts = _parts(verbs)
    lines = [
        f"complete -c launcher -n '__launcher_first 1' -a {name} -d {_fish_quote(text)}"
        for name, text in _first_told(verbs).items()
    ]
    for first, names in parts.items():
        words = _fish_quote(" ".join(names))
        lines.append(f"complete -c launcher -n '__launcher_at {first}; and __launcher_first 2' -a {words}")
    for verb in verbs:
        first, _, part = verb.name.partition(" ")
        at = f"__launcher_at {first}" + (f" {part} {' '.join(parts[first])}" if part else "")
        for flag in verb.flags:
            spelt = "".join(f" -l {n[2:]}" if n.startswith("--") else f" -s {n[1:]}" for n in flag.names)
            values = _fish_values(flag.values, is_flag=True)
            lines.append(f"complete -c launcher -n '{at}'{spelt}{values} -d {_fish_quote(flag.told)}")
        values = _fish_values(verb.values, is_flag=False)
        if values:
            lines.append(f"complete -c launcher -n '{at}'{values}")
    return _FISH_HEAD + "\n".join(lines) + "\n"


def _fish_values(values: Values, *, is_flag: bool) -> str:
    required = " -x" if is_flag else ""
    made = {
        "nothing": "",
        "anything": required,
        "words": f"{required} -a {_fish_quote(' '.join(values.words))}",
        "file": " -r -F" if is_flag else " -F",
        "folder": f"{required} -a '(__fish_complete_directories)'",
        "expert": f"{required} -a '(__launcher_experts)'",
        "run": f"{required} -a '(__launcher_runs)'",
    }
    return made[values.kind]


def _first_names(verbs: Sequence[Verb]) -> list[str]:
    return list(dict.fromkeys(verb.name.partition(" ")[0] for verb in verbs))


def _first_told(verbs: Sequence[Verb]) -> dict[str, str]:
    told: dict[str, str] = {}
    for verb in verbs:
        told.setdefault(verb.name.partition(" ")[0], verb.told)
    return told


def _parts(verbs: Sequence[Verb]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for verb in verbs:
        first, _, part = verb.name.partition(" ")
        if part:
            parts.setdefault(first, []).append(part)
    return parts


def _by_values(flags: Sequence[Flag]) -> Iterator[tuple[list[str], Values]]:
    """Flags that take the same values share a line."""
    found: dict[Values, list[str]] = {}
    for flag in flags:
        if flag.values.kind != "nothing":
            found.setdefault(flag.values, []).extend(flag.names)
    yield from ((names, values) for values, names in found.items())


def _quote(text: str) -> str:
    return shlex.quote(text)


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[Sequence[Verb]], str]] = {"bash": render_bash, "zsh": render_zsh, "fish": render_fish}
