"""Answer one question with a trained expert, in the prompt format of its training: `launcher ask`."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.core.errors import InputError, escape
from launcher.core.log import get_logger
from launcher.corpus.heldout import HeldOutRow, load_held_out_rows
from launcher.corpus.row_text import format_question
from launcher.corpus.spec import make_preparation_spec
from launcher.corpus.tokenizer import load_planned_tokenizer
from launcher.judges.json_value.compare import load_json
from launcher.manifest import Manifest
from launcher.manifest.parse_json import shorten
from launcher.request.request import base_folders
from launcher.training.inference.prompt import Question, compose_question
from launcher.training.inference.trained_run import TrainedRun, load_trained_run
from launcher.training.runtime.parent_watch import exit_with_parent
from launcher.training.runtime.subcommand import run_subcommand

if TYPE_CHECKING:
    from launcher.training.inference.generate import Answer

log = get_logger(__name__)

_DEFAULT_NEW_TOKENS = 512
_EXAMPLES = 50  # rows read to choose one, as there may be millions
_PARSES = "parses"
# All control characters but tab and newline, which a terminal would interpret.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = _make_parser().parse_args(argv)
    exit_with_parent()
    return run_subcommand("ask", lambda: _ask(arguments), is_json=arguments.json)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.training.inference.ask", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR")
    parser.add_argument("--question", metavar="TEXT")
    parser.add_argument("--input", metavar="TEXT")
    parser.add_argument("--system", metavar="TEXT")
    parser.add_argument("--field", action="append", default=[], metavar="NAME=TEXT")
    parser.add_argument("--max-new-tokens", type=int, default=_DEFAULT_NEW_TOKENS, metavar="N")
    parser.add_argument("--json", action="store_true")
    return parser


def _ask(arguments: argparse.Namespace) -> str:
    trained = load_trained_run(arguments.run)
    run = trained.with_system(arguments.system)
    fields = parse_fields(arguments.field)
    row = _load_example(trained) if arguments.question is None and not fields else None
    question = arguments.question or ""
    system = "" if row is not None else check_fields(run, question, arguments.input, fields).system_message
    if note := describe_system(trained, system, arguments.system):
        log.info(note)
    if run.plan.profile == "smoke":
        log.info("note: this is a smoke run with a tiny base model; it can only answer questions like its sample rows")
    from launcher.training.inference.generate import answer_question

    prompt = "" if row is None else row.prompt
    answer = answer_question(
        run, question, arguments.input or "", max_new_tokens=arguments.max_new_tokens, fields=fields, prompt=prompt
    )
    check = check_json(run.manifest, answer.text)
    if answer.end == "length":
        log.info(f"note: cut off after {answer.num_tokens} tokens; raise --max-new-tokens for more")
    if check is not None:
        log.info(f"json: {check}")
    if arguments.json:
        return _render_json(answer, check, system, row)
    if not sys.stdout.isatty():
        return answer.text
    return _CONTROL_CHARACTERS.sub(lambda match: repr(match.group())[1:-1], answer.text)


def _load_example(run: TrainedRun) -> HeldOutRow:
    """Load a held-out row to ask, and log it with its answer."""
    folder = Path(run.plan.data.folder)
    spec = make_preparation_spec(run.plan, folder, load_planned_tokenizer(run.plan, base_folders(folder)))
    try:
        held_out = load_held_out_rows(spec, 1, among=_EXAMPLES)
    except InputError as error:
        raise InputError(f"no question given, and no row to ask instead: {error.title}", error.problems) from None
    (row,) = held_out.rows
    own = f"launcher ask {shlex.quote(str(run.paths.root))} {format_question(run.plan.data.field_mapping)}"
    log.info(f"no question given: asking a {held_out.split} row of {held_out.source}; to ask your own: {own}")
    for name, text in (("question", row.instruction), ("input", row.context), ("expected", row.answer)):
        if text:
            log.info(f"{name}: {escape(text)}")
    return row


def parse_fields(words: Sequence[str]) -> dict[str, str]:
    """Parse --field NAME=TEXT arguments into a dict; a dotted name means a field inside an object."""
    fields = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise InputError(f"--field {word}: not NAME=TEXT", hint="for example: --field subject='It does not start'")
        if name in fields:
            raise InputError(f"--field {name} is given twice", hint="give each field once")
        fields[name] = text
    return fields


def check_fields(run: TrainedRun, question: str, context: str | None, fields: Mapping[str, str]) -> Question:
    """Return the texts of the prompt; raises InputError if the arguments do not fit the fields of the training rows."""
    mapping = run.plan.data.field_mapping
    asked = compose_question(run.plan.data, question, context or "", fields)
    if not asked.content.strip():
        raise InputError("the question is empty")
    given = {
        "the question": question,
        "--input": context or "",
        "--system": run.plan.data.system_prompt or "",
        **{f"--field {name}": text for name, text in fields.items()},
    }
    for name, text in given.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name} is not UTF-8 text") from None
    if mapping.instruction is None and not (context and mapping.messages):
        return asked
    if context and mapping.input is None:
        raise InputError(
            f"--input: {run.plan.expert} was trained without a second field (field_mapping.input)",
            hint="include it in the question",
        )
    if not asked.context and mapping.input is not None:
        log.info(f"note: {run.plan.expert} was trained with a second field, {mapping.input}; pass it with --input")
    return asked


def describe_system(run: TrainedRun, used: str, given: str | None) -> str:
    """Return a note with the prompt's system message and its source, empty if it has none; raise if it is set twice."""
    if given is not None and used != given:
        raise InputError("--system and --field both set a system message", hint="omit one of them")
    if not used:
        return ""
    source = "--field"
    if given is not None:
        source = "--system"
    elif run.outcome is not None and used == run.outcome.shared_system:
        source = "as in all training rows; --system TEXT changes it"
    elif used == run.plan.data.system_prompt:
        source = "training.dataset.system_prompt; --system TEXT changes it"
    return f"system message: {escape(shorten(' '.join(used.split())))} ({source})"


def check_json(manifest: Manifest, text: str) -> str | None:
    """Return "parses" or why an answer is not valid JSON; None if the expert's answers are not JSON."""
    decoding = manifest.training.decoding
    if decoding is None or decoding.grammar_type != "json":
        return None
    try:
        load_json(text)
    except ValueError as error:
        return f"does not parse: {error}"
    return _PARSES


def _render_json(answer: Answer, check: str | None, system: str, row: HeldOutRow | None) -> str:
    result = {
        **({} if row is None else {"question": row.instruction, "input": row.context, "expected": row.answer}),
        "answer": answer.text,
        "system": system,
        "prompt": answer.prompt,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_answer_tokens": answer.num_tokens,
        "end": answer.end,
        "check": None if check is None else {"language": "json", "valid": check == _PARSES, "message": check},
    }
    return json.dumps(result, indent=2)


if __name__ == "__main__":
    sys.exit(main())
