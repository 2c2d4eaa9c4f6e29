"""`launcher new`: create an expert from a dataset file, showing every inferred setting with its reason."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.prepare import print_segments
from launcher.cli.tables import print_json, print_table
from launcher.core.errors import ExitCode, InputError, escape
from launcher.core.run_paths import expand_home
from launcher.core.units import format_count, format_duration, format_gib, format_percent
from launcher.hardware.model import format_hardware
from launcher.plan.model import Plan

if TYPE_CHECKING:
    from launcher.corpus.sources import FileSource
    from launcher.new_expert.create import NewExpert

_TASKS = ("json", "sql", "cypher", "typescript", "exact_match", "text")
_TEMPLATES = ("chatml", "qwen3", "llama3", "alpaca", "tokenizer")


class _OnlyOnce(argparse.Action):
    """Store a file; refuse a second one, which would silently replace the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002  (argparse passes it)
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        if getattr(namespace, self.dest, None) not in (None, self.default):
            raise argparse.ArgumentError(self, "given twice; rows are read from one file: join the files first")
        setattr(namespace, self.dest, values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher new`."""
    parser.add_argument("name", metavar="EXPERT", help="name of the new expert, e.g. sales")
    parser.add_argument(
        "--data",
        type=expand_home,
        action=_OnlyOnce,
        metavar="FILE",
        required=True,
        help="your rows: JSONL, JSON, CSV or Parquet",
    )
    parser.add_argument(
        "--validation",
        type=expand_home,
        action=_OnlyOnce,
        metavar="FILE",
        help="validation split (default: 10 %% of the rows)",
    )
    parser.add_argument(
        "--test",
        type=expand_home,
        action=_OnlyOnce,
        metavar="FILE",
        help="test split for `launcher eval` (default: the validation split)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-dir",
        type=expand_home,
        metavar="DIR",
        help="default: experts/EXPERT if experts/ exists, else ./EXPERT",
    )
    output.add_argument("--force", action="store_true", help="replace an existing manifest and sample")
    output.add_argument("--no-sample", action="store_true", help="write no sample/, which runs without a GPU need")
    output.add_argument("--dry-run", action="store_true", help="print the manifest and write nothing")
    guesses = parser.add_argument_group("instead of an inferred setting")
    guesses.add_argument(
        "--prompt-field", metavar="NAME", help='field with the prompt, or a format string: "{subject}\\n{body}"'
    )
    guesses.add_argument("--answer-field", metavar="NAME", help="field with the answer to train on")
    guesses.add_argument("--context-field", metavar="NAME", help="field with the context: a schema, a document")
    guesses.add_argument("--system-field", metavar="NAME", help="field with the system prompt")
    guesses.add_argument("--messages-field", metavar="NAME", help="field with conversations: lists of messages")
    guesses.add_argument("--text-field", metavar="NAME", help="field with complete texts: already templated, or plain")
    guesses.add_argument("--format", choices=("jsonl", "json", "csv", "parquet"), help="default: by the file suffix")
    guesses.add_argument("--base", type=expand_home, metavar="NAME", help="base model: a Hub name or a folder")
    guesses.add_argument("--template", choices=_TEMPLATES, help="prompt template (default: that of the base model)")
    guesses.add_argument(
        "--chat-template", type=expand_home, metavar="FILE", help="a Jinja chat template, copied next to the manifest"
    )
    guesses.add_argument("--system-prompt", metavar="TEXT", help="system prompt of rows without their own")
    guesses.add_argument(
        "--task",
        choices=_TASKS,
        help="language of the answers, which selects the judge (text: no judge)",
    )
    parser.add_argument("--json", action="store_true", help="print guesses, manifest, mask and plan as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Create the expert and print what was inferred."""
    from launcher.new_expert.create import create_expert
    from launcher.new_expert.infer_roles import FieldFlags
    from launcher.new_expert.proposal import Options

    roles = ("prompt", "answer", "context", "system", "messages", "text")
    options = Options(
        fields=FieldFlags(
            **{role: _read_format(getattr(arguments, f"{role}_field")) for role in roles},
            system_prompt=arguments.system_prompt,
        ),
        chat_template=_make_path("--chat-template", arguments.chat_template),
        base=arguments.base,
        template=arguments.template,
        task=arguments.task,
        validation=_make_path("--validation", arguments.validation),
        test=_make_path("--test", arguments.test),
    )
    new_expert = create_expert(
        arguments.name,
        Path(arguments.data),
        options,
        output_dir=_make_path("--output-dir", arguments.output_dir),
        data_format=arguments.format,
        with_sample=not arguments.no_sample,
        force=arguments.force,
        dry_run=arguments.dry_run,
    )
    if arguments.json:
        _print_json(new_expert)
    else:
        print_new_expert(new_expert)
    return ExitCode.DONE


def _read_format(text: str | None) -> str | None:
    r"""Return a field's name as it is; in a format string such as "{subject}\n{body}", replace \n by a line break."""
    return text.replace("\\n", "\n") if text is not None and "{" in text else text


def _make_path(flag: str, text: str | None) -> Path | None:
    if text is not None and not text.strip():
        raise InputError(f"{flag}: the path is empty", hint=f"give a path, or omit {flag}")
    return None if text is None else Path(text)


def _print_json(new_expert: NewExpert) -> None:
    proposal, mask = new_expert.proposal, new_expert.proposal.mask
    content = {
        "expert": new_expert.expert,
        "folder": str(new_expert.folder),
        "files": [str(file) for file in new_expert.files],
        "rows": proposal.num_rows,
        "split_rows": dict(new_expert.num_split_rows),
        "rejected_rows": proposal.num_rejected,
        "guesses": [{"what": guess.name, "value": guess.value, "why": guess.reason} for guess in proposal.guesses],
        "notes": list(proposal.notes),
        "manifest": json.loads(new_expert.manifest),
        "mask": {
            "row": mask.row,
            "tokens": mask.num_tokens,
            "trained": mask.num_trained,
            "template": mask.template,
            "notes": list(mask.notes),
            "segments": [segment.model_dump() for segment in mask.segments],
        },
        "plan": None if new_expert.plan is None else new_expert.plan.plan.model_dump(mode="json"),
        "next": f"launcher train {new_expert.cli_name}",
    }
    print_json(content)


def _describe_splits(num_rows: Mapping[str, int]) -> str:
    """Return how many rows each split has, and what follows from an empty one."""
    counts = [f"{name} {count:,}" for name, count in num_rows.items()]
    if not num_rows["validation"]:
        counts[1] += " (no loss is measured on other rows)"
    elif not num_rows["test"]:
        counts[2] += " (validation rows are used)"
    return ", ".join(counts)


def _describe_format(source: FileSource) -> str:
    from launcher.corpus.sources import find_delimiter

    mark = find_delimiter(source.path) if source.format == "csv" else ","
    return source.format + {",": "", ";": ", separated by semicolons", "\t": ", separated by tabs"}[mark]


# The decisions of a plan that a new user looks at first.
_SHOWN_DECISIONS = ("profile", "precision", "adapter", "global batch", "batch split", "strategy", "training length")


def print_new_expert(new_expert: NewExpert) -> None:
    """Print what was inferred, the loss mask of a row, the plan, and the next commands."""
    proposal = new_expert.proposal
    source, mask = proposal.profile.source, proposal.mask
    about = "" if proposal.profile.is_complete else "about "
    print(f"{escape(str(source.path))}: {about}{proposal.num_rows:,} usable rows ({_describe_format(source)})")
    print(f"rows: {_describe_splits(new_expert.num_split_rows)}; rejected {proposal.num_rejected:,}\n")
    rows = [(guess.name, guess.value, guess.reason) for guess in proposal.guesses]
    print_table(("setting", "value", "reason"), rows, styles=("cyan", "bold", ""))
    for note in proposal.notes:
        print(f"note: {escape(note)}")
    place = "Line" if source.format in ("jsonl", "csv") else "Row"
    share = format_percent(mask.num_trained / max(1, mask.num_tokens))
    print(
        f"\n{place} {mask.row} in template {mask.template}; lines with | are trained: {mask.num_trained:,} of "
        f"{mask.num_tokens:,} tokens ({share}), counted with the tokenizer of {escape(mask.tokenizer)}"
    )
    for note in mask.notes:
        print(f"({escape(note)})")
    print_segments(mask.segments)
    if new_expert.plan is not None:
        _print_plan(new_expert.plan.plan)
    _print_next_steps(new_expert)


def _print_plan(plan: Plan) -> None:
    print(f"\nPlan for this machine ({escape(format_hardware(plan.hardware))}), in short:")
    decisions = {decision.name: decision for decision in plan.decisions}
    rows = [(name, decisions[name].value, decisions[name].reason) for name in _SHOWN_DECISIONS if name in decisions]
    print_table(("decision", "value", "reason"), rows, styles=("cyan", "bold", ""))
    memory, speed = plan.memory, plan.speed
    print(f"memory per rank: {format_gib(memory.total_bytes)} of {format_gib(memory.device_bytes)}")
    if speed.tokens_per_second is not None and speed.total_seconds is not None:
        print(
            f"speed: about {format_count(speed.tokens_per_second)} tokens/s, about "
            f"{format_duration(speed.total_seconds)} for all steps, without start-up, evaluation and checkpoints"
        )


def _print_next_steps(new_expert: NewExpert) -> None:
    folder = escape(str(new_expert.folder))
    if not new_expert.files:
        print("\n" + "\n".join(map(escape, new_expert.manifest.splitlines())))
        print(f"Dry run: nothing was written. The folder would be {folder}/.")
        return
    names = ", ".join(str(file.relative_to(new_expert.folder)) for file in new_expert.files)
    print(f"\nWritten to {folder}/: {names}. The manifest is valid and can be planned.")
    sample = {file.stem: len(file.read_bytes().splitlines()) for file in new_expert.files if file.suffix == ".jsonl"}
    if sample:
        counts = ", ".join(f"{count:,} for {name}" for name, count in sample.items())
        print(f"(sample/ has some of your rows, {counts}: without a GPU, the smoke profile uses only them.)")
    quoted = shlex.quote(new_expert.cli_name)
    print(f"Next:  launcher train {quoted}")
    print(f"       launcher plan {quoted} --gpu rtx4090    # every decision, for any GPU of the catalogue")
