"""`launcher new`: from somebody's rows to an expert that can be trained, with every guess told."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import ExitCode, InputError

if TYPE_CHECKING:
    from launcher.new_expert.making import NewExpert

HELP = "make a new expert from your rows: looks at them, writes a commented manifest, shows one row's mask and the plan"

_TASKS = ("json", "sql", "cypher", "typescript", "text")
_TEMPLATES = ("chatml", "qwen3", "llama3", "alpaca", "tokenizer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="EXPERT", help="what it shall be called: sales")
    parser.add_argument("--data", metavar="FILE", required=True, help="your rows: JSONL, JSON, CSV or Parquet")
    parser.add_argument("--validation", metavar="FILE", help="rows to evaluate on (default: a tenth is held out)")
    parser.add_argument("--test", metavar="FILE", help="rows for `launcher eval` (default: those of the validation)")
    where = parser.add_argument_group("where it goes")
    where.add_argument("--into", metavar="DIR", help="default: experts/EXPERT where there is experts/, else ./EXPERT")
    where.add_argument("--force", action="store_true", help="replace the manifest and the sample that are there")
    where.add_argument(
        "--no-sample", action="store_true", help="no sample/ of your rows, which runs without a GPU need"
    )
    where.add_argument("--dry-run", action="store_true", help="show the manifest, and write nothing")
    guesses = parser.add_argument_group("instead of a guess")
    guesses.add_argument("--prompt-field", metavar="NAME", help="what is asked")
    guesses.add_argument("--answer-field", metavar="NAME", help="what is to be answered")
    guesses.add_argument("--context-field", metavar="NAME", help="what the question is about: a schema, a document")
    guesses.add_argument("--system-field", metavar="NAME", help="who the expert is, in its own words")
    guesses.add_argument("--messages-field", metavar="NAME", help="whole conversations: a list of messages")
    guesses.add_argument("--text-field", metavar="NAME", help="whole documents: already templated, or plain text")
    guesses.add_argument("--format", choices=("jsonl", "json", "csv", "parquet"), help="default: by the file's name")
    guesses.add_argument("--base", metavar="NAME", help="the base model: a hub name or a folder")
    guesses.add_argument("--template", choices=_TEMPLATES, help="how rows become text (default: by the base)")
    guesses.add_argument("--task", choices=_TASKS, help="what the answers are, which decides who judges them")
    parser.add_argument("--json", action="store_true", help="print guesses, manifest, mask and plan as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    try:
        from launcher.new_expert.guesses import GivenFields
        from launcher.new_expert.making import make_new_expert
        from launcher.new_expert.proposal import Wishes
    except ModuleNotFoundError as error:
        raise InputError(
            f"looking at rows needs the package {error.name}", hint="pip install 'expert-launcher[data]'"
        ) from None

    fields = GivenFields(
        prompt=arguments.prompt_field,
        answer=arguments.answer_field,
        context=arguments.context_field,
        system=arguments.system_field,
        messages=arguments.messages_field,
        text=arguments.text_field,
    )
    wishes = Wishes(
        fields=fields,
        base=arguments.base,
        template=arguments.template,
        task=arguments.task,
        validation=_path("--validation", arguments.validation),
        test=_path("--test", arguments.test),
    )
    made = make_new_expert(
        arguments.name,
        Path(arguments.data),
        wishes,
        into=_path("--into", arguments.into),
        data_format=arguments.format,
        with_sample=not arguments.no_sample,
        force=arguments.force,
        dry_run=arguments.dry_run,
    )
    if arguments.json:
        _print_json(made)
    else:
        from launcher.cli.show_new import print_new_expert

        print_new_expert(made)
    return ExitCode.DONE


def _path(flag: str, text: str | None) -> Path | None:
    if text is not None and not text.strip():
        raise InputError(f"{flag}: an empty name is no place", hint=f"leave {flag} out, or name one")
    return None if text is None else Path(text)


def _print_json(made: NewExpert) -> None:
    proposal, mask = made.proposal, made.proposal.mask
    told = {
        "expert": made.expert,
        "folder": str(made.folder),
        "files": [str(file) for file in made.files],
        "rows": proposal.num_rows,
        "guesses": [{"what": guess.what, "value": guess.value, "why": guess.why} for guess in proposal.guesses],
        "notes": list(proposal.notes),
        "manifest": json.loads(made.manifest),
        "mask": {
            "row": mask.row,
            "tokens": mask.num_tokens,
            "trained": mask.num_trained,
            "template": mask.template,
            "notes": list(mask.notes),
            "segments": [segment.model_dump() for segment in mask.segments],
        },
        "plan": None if made.plan is None else made.plan.plan.model_dump(mode="json"),
        "next": f"launcher train {made.called}",
    }
    json.dump(told, sys.stdout, indent=2, ensure_ascii=False)
    print()
