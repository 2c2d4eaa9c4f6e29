"""`launcher completion SHELL`: a script that completes verbs, flags, experts and runs; made from the parsers."""

from __future__ import annotations

import argparse
import sys

from launcher.errors import ExitCode

HELP = "print a script that completes this command in bash, zsh or fish"

_HOW = """\
once and for all:
  bash   launcher completion bash > ~/.local/share/bash-completion/completions/launcher
  zsh    launcher completion zsh > "${fpath[1]}/_launcher"
  fish   launcher completion fish > ~/.config/fish/completions/launcher.fish
for this shell only: source <(launcher completion bash), or launcher completion fish | source
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    parser.epilog = _HOW
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(arguments: argparse.Namespace) -> ExitCode:
    from launcher.cli.completion_scripts import SCRIPTS
    from launcher.cli.completion_words import list_verbs
    from launcher.cli.main import make_parser

    sys.stdout.write(SCRIPTS[arguments.shell](list_verbs(make_parser())))
    return ExitCode.DONE
