"""`python -m launcher.training.ask`: one question to a trained expert, in the prompt that it was trained with."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import InputError, say
from launcher.training.checking import Verdict, check_answer
from launcher.training.finished import FinishedRun, load_finished
from launcher.training.guards import end_with_parents
from launcher.training.verb import run_verb

if TYPE_CHECKING:
    from launcher.training.answering import Answer

_DEFAULT_NEW_TOKENS = 512
# All but tab and newline: a terminal would obey them.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _make_parser().parse_args(argv)
    end_with_parents()
    return run_verb("ask", lambda: _ask(arguments), is_json=arguments.json)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.training.ask", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR")
    parser.add_argument("--question", required=True, metavar="TEXT")
    parser.add_argument("--input", metavar="TEXT")
    parser.add_argument("--max-new-tokens", type=int, default=_DEFAULT_NEW_TOKENS, metavar="N")
    parser.add_argument("--json", action="store_true")
    return parser


def _ask(arguments: argparse.Namespace) -> str:
    run = load_finished(arguments.run)
    check_fields(run, arguments.question, arguments.input)
    if run.plan.profile == "smoke":
        say("note: a smoke run: a tiny base, which knows the languages of our samples and nothing of the world")
    from launcher.training.answering import answer_question

    answer = answer_question(run, arguments.question, arguments.input or "", arguments.max_new_tokens)
    verdict = check_answer(run.manifest, answer.text)
    if answer.end == "length":
        say(f"note: cut off after {answer.num_tokens} tokens; --max-new-tokens allows more")
    if verdict is not None:
        say(f"{verdict.language}: {verdict.words}")
    if arguments.json:
        return _render_json(answer, verdict)
    return _CONTROLS.sub(lambda found: repr(found.group())[1:-1], answer.text) if sys.stdout.isatty() else answer.text


def check_fields(run: FinishedRun, question: str, context: str | None) -> None:
    """What is asked must have a place in the rows that the expert learned from."""
    mapping = run.plan.data.field_mapping
    if not question.strip():
        raise InputError("the question is empty")
    for name, text in (("the question", question), ("--input", context or "")):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name} is not UTF-8 text") from None
    if mapping.instruction is None:
        return
    if context and mapping.input is None:
        raise InputError(
            f"--input: {run.plan.expert} was trained without a second field (field_mapping.input)",
            hint="put it into the question",
        )
    if not context and mapping.input is not None:
        say(f"note: {run.plan.expert} was trained with a second field, {mapping.input}; --input gives it")


def _render_json(answer: Answer, verdict: Verdict | None) -> str:
    result = {
        "answer": answer.text,
        "prompt": answer.prompt,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_answer_tokens": answer.num_tokens,
        "end": answer.end,
        "check": None
        if verdict is None
        else {"language": verdict.language, "valid": verdict.is_valid, "said": verdict.words},
    }
    return json.dumps(result, indent=2)


if __name__ == "__main__":
    sys.exit(main())
