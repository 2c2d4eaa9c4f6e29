"""Propose every setting of a new expert's manifest from its rows, each with a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from launcher.base_models.shapes import ModelShape, load_shape
from launcher.core.errors import InputError
from launcher.corpus.chat_template_file import load_chat_template
from launcher.corpus.documents import Document, DocumentBuilder
from launcher.corpus.first_rows import count_rows
from launcher.corpus.heldout import extract_question
from launcher.corpus.row_count import guess_tokens
from launcher.corpus.rows import BadRow, Rejections, Row
from launcher.corpus.templates import TOOLS_REASON
from launcher.corpus.tokenizer import load_tokenizer
from launcher.corpus.validation_cut import ValidationCut, choose_validation_cut
from launcher.new_expert.answer_language import Language, check_language, detect_language
from launcher.new_expert.hyperparameters import Hyperparameters, choose_hyperparameters
from launcher.new_expert.infer_roles import FieldFlags, Guess, Roles, infer_roles, list_reasons
from launcher.new_expert.row_profile import RowProfile, sample_evenly
from launcher.new_expert.template_choice import (
    ChosenTemplate,
    Mask,
    choose_template,
    count_untrained,
    make_mask,
)

DEFAULT_BASE = "Qwen/Qwen3-0.6B"
NO_JUDGE = "text"  # --task for answers in a language without a judge
_JUDGED_ROWS = 400
_MAX_VALIDATION_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Settings that flags set; None if a setting is to be proposed."""

    fields: FieldFlags | None = None
    base: str | None = None
    template: str | None = None
    task: str | None = None
    validation: Path | None = None
    test: Path | None = None
    chat_template: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Everything that the manifest of the new expert says, with reasons and notes."""

    options: Options
    profile: RowProfile
    roles: Roles
    builder: DocumentBuilder
    prompt_hashes: frozenset[int]  # of the usable rows
    base: ModelShape
    template: ChosenTemplate
    trains_all: bool  # the loss covers every token
    language: Language | None
    hyperparameters: Hyperparameters
    num_rows: int  # usable
    num_usable: int  # of the rows that were read
    num_rejected: int  # of the rows that were read
    cut: ValidationCut  # the validation split, if no file is given
    num_validation: int | None  # rows split off for validation; None: a file is given, or no split is possible
    mask: Mask
    notes: tuple[str, ...]

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return self.num_validation is not None or self.options.validation is not None

    def count_split_rows(self, num_given: Mapping[str, int]) -> dict[str, int]:
        """Return the usable rows of each split; `num_given`: of the files of --validation and --test."""
        share = 0.0 if "validation" in num_given else (self.num_validation or 0) / self.num_usable
        cut = round(share * self.num_rows)
        return {"training": self.num_rows - cut, "validation": cut, "test": 0, **num_given}

    @property
    def guesses(self) -> tuple[Guess, ...]:
        """All proposed settings, in the order in which they are shown."""
        options, sizes = self.options, self.hyperparameters
        base_reason = "set by --base" if options.base else "the default base model; change it with --base"
        loss = ("every token", "the rows do not separate prompt and answer")
        if not self.trains_all:
            loss = ("answers only", "with their end token; prompts are masked")
        return (
            *self.roles.guesses,
            Guess(name="base", value=self.base.name, reason=base_reason),
            Guess(name="template", value=self.template.name, reason=self.template.reason),
            Guess(name="loss on", value=loss[0], reason=loss[1]),
            self._describe_validation(),
            *([Guess(name="test", value=options.test.name, reason="set by --test")] if options.test else []),
            Guess(name="judge", value=self.language.name if self.language else "none", reason=self._judge_reason()),
            Guess(name="sequence", value=f"{sizes.max_seq_length:,} tokens", reason=sizes.length_reason),
            Guess(name="batch", value=f"{sizes.global_batch_size} sequences", reason=sizes.batch_reason),
            Guess(name="epochs", value=f"{sizes.epochs:g}", reason=sizes.epochs_reason),
        )

    def _describe_validation(self) -> Guess:
        if self.options.validation is not None:
            value, reason = self.options.validation.name, "set by --validation"
        elif self.num_validation is None:
            value, reason = "none", "too few distinct prompts to split by their hash"
        else:
            value = f"{self.num_validation:,} of {self.num_usable:,} rows"
            reason = "about 10 %, split by a hash of the prompt, so that no prompt is in both splits"
        return Guess(name="validation", value=value, reason=reason)

    def _judge_reason(self) -> str:
        if self.language is not None:
            return self.language.reason
        if self.options.task is not None:
            return "set by --task"
        return (
            "the answers are not JSON, SQL, Cypher, TypeScript or labels; --task exact_match compares them as text, "
            "evaluation.judge_command runs your own judge"
        )


def make_proposal(profile: RowProfile, options: Options, base_folders: tuple[Path, ...]) -> Proposal:
    """Propose all settings. Raises InputError if the rows cannot be trained on."""
    if options.base is not None and not options.base.strip():
        raise InputError("--base: the name is empty", hint=f"without --base it is {DEFAULT_BASE}")
    roles = infer_roles(profile, options.fields)
    base = load_shape(options.base or DEFAULT_BASE, base_folders)
    tokenizer = load_tokenizer(base.name, base_folders, allow_tiny_fallback=True)
    own = None
    if options.chat_template is not None:
        own = load_chat_template(options.chat_template.parent, options.chat_template.name)
    template = choose_template(base, options.template, tokenizer, own)
    trains_all = roles.kind == "text"
    builder = DocumentBuilder(reader=roles.reader, template=template.preview, trains_all=trains_all)
    usable_rows, rejections = make_documents(builder, profile.rows)
    documents = [document for _, document in usable_rows]
    _check_usable(documents, rejections, profile, template)
    _check_variety(documents, profile)
    usable = len(documents) / len(profile.rows)
    num_rows = round(_count_rows(profile) * usable)
    language = None if trains_all else _detect_language(options.task, usable_rows, builder)
    row_tokens = [guess_tokens(document) for document in documents]
    # The rule of `launcher prepare`.
    cut = choose_validation_cut([document.prompt_hash for document in documents])
    num_validation = sum(cut.holds_out(document.prompt_hash) for document in documents)
    share = 0.0 if options.validation is not None else num_validation / len(documents)
    sizes = choose_hyperparameters(row_tokens, num_rows, base.max_positions, num_rows - round(share * num_rows))
    notes = [
        *_note_tool_calls(template, rejections),
        *profile.notes,
        *note_bad_rows(profile, rejections),
        *_note_conflicts(documents),
        *roles.notes,
        *template.notes,
    ]
    num_untrained = count_untrained(documents, sizes.max_seq_length)
    if num_untrained:
        notes.append(
            f"in {num_untrained:,} of {len(documents):,} rows the answer begins after the first "
            f"{sizes.max_seq_length:,} tokens, where the row is truncated: these answers are not trained"
        )
    num_chats = sum(sum(segment.is_trained for segment in document.segments) > 1 for document in documents)
    if num_chats and language is not None:
        several = profile.format_share(num_chats)
        notes.append(f"{several} have several answers: all are trained, `launcher eval` judges the first of each")
    return Proposal(
        options=options,
        profile=profile,
        roles=roles,
        builder=builder,
        prompt_hashes=frozenset(document.prompt_hash for document in documents),
        base=base,
        template=template,
        trains_all=trains_all,
        language=language,
        hyperparameters=sizes,
        num_rows=num_rows,
        num_usable=len(documents),
        num_rejected=len(profile.bad_rows) + len(profile.rows) - len(documents),
        cut=cut,
        num_validation=num_validation if 1 <= num_validation <= _MAX_VALIDATION_SHARE * len(documents) else None,
        mask=make_mask(documents, tokenizer, base.name, template, sizes.max_seq_length),
        notes=(*notes, *(language.notes if language else ())),
    )


def make_documents(builder: DocumentBuilder, rows: Sequence[Row]) -> tuple[list[tuple[Row, Document]], Rejections]:
    """Return the usable rows with their documents, and the reasons why others are not usable."""
    usable_rows, rejections = [], Rejections()
    for row in rows:
        document = builder.make(row)
        if isinstance(document, BadRow):
            rejections.add(document)
        else:
            usable_rows.append((row, document))
    return usable_rows, rejections


def _check_usable(
    documents: Sequence[Document], rejections: Rejections, profile: RowProfile, template: ChosenTemplate
) -> None:
    """Raise InputError if the template can write none of the rows."""
    if documents:
        return
    hint = "choose another --template, or change the rows"
    if all(TOOLS_REASON in reason for reason in rejections.counts):
        hint = (
            "--template tokenizer takes the base's own chat template, on a machine with its tokenizer; "
            "--chat-template FILE takes a Jinja template that writes tools"
        )
    elif template.preview_note:
        hint = (
            f"rows are {template.preview_note}: try again where the base's tokenizer is, or choose another --template"
        )
    raise InputError(f"{profile.source.path}: no row can be used", list_reasons(rejections), hint=hint)


def _check_variety(documents: Sequence[Document], profile: RowProfile) -> None:
    path, fields = profile.source.path, ", ".join(profile.fields)
    texts = {"".join(segment.text for segment in document.segments) for document in documents}
    if len(texts) < 2:
        if len(documents) == 1:
            raise InputError(f"{path}: there is only one usable row", hint="an expert needs at least a few dozen rows")
        raise InputError(
            f"{path}: all {len(documents):,} rows are identical",
            hint="are prompt and answer the right fields? Choose others with --prompt-field and --answer-field; "
            f"rows have: {fields}",
        )
    if len({document.prompt_hash for document in documents}) == 1:
        raise InputError(
            f"{path}: all {len(documents):,} rows have the same prompt, but {len(texts):,} different answers",
            hint=f"add the missing field with --prompt-field or --context-field; rows have: {fields}",
        )


def _count_rows(profile: RowProfile) -> int:
    """Count the rows; for a file that was not read completely, estimate them from its size."""
    if profile.is_complete:
        return len(profile.rows)
    first: list[Row | BadRow] = [*profile.rows, *profile.bad_rows]
    first.sort(key=lambda row: row.number)
    num_rows, _ = count_rows(profile.source, first, islice(profile.source.read(), len(first), None))
    return round(num_rows * len(profile.rows) / len(first))


def _detect_language(
    task: str | None, usable_rows: Sequence[tuple[Row, Document]], builder: DocumentBuilder
) -> Language | None:
    if task == NO_JUDGE:
        return None
    documents = {row.number: document for row, document in usable_rows}
    rows = sample_evenly([row for row, _ in usable_rows], _JUDGED_ROWS)
    questions = [extract_question(builder, row, documents[row.number]) for row in rows]
    if task is None:
        return detect_language(questions)
    reason = "set by --task"
    if task == "exact_match":
        return Language(name=task, reason=reason)
    not_parsed = Language(name=task, reason=reason, notes=(f"most answers of the rows do not parse as {task}",))
    return check_language(task, questions, reason) or not_parsed


def _note_tool_calls(template: ChosenTemplate, rejections: Rejections) -> list[str]:
    """Turn rejections of rows with tool calls into a note if training uses another template than the preview."""
    if template.name == template.preview.name:
        return []
    count = sum(rejections.counts.pop(reason) for reason in list(rejections.counts) if TOOLS_REASON in reason)
    if not count:
        return []
    where = "on a machine with the base's tokenizer, `launcher prepare` checks whether its chat template writes them"
    return [f"{count:,} {'row has' if count == 1 else 'rows have'} tools or tool calls: {where}"]


def note_bad_rows(profile: RowProfile, rejections: Rejections) -> list[str]:
    """Return notes on rows that cannot be read or used, with the reasons, and on exact duplicates."""
    notes = []
    if profile.bad_rows:
        unreadable = Rejections()
        for row in profile.bad_rows:
            unreadable.add(row)
        total = len(profile.rows) + unreadable.total
        notes.append(f"{unreadable.total:,} of {total:,} rows cannot be read: {_format_reasons(unreadable)}")
    if rejections.total:
        notes.append(f"{profile.format_share(rejections.total)} cannot be used: {_format_reasons(rejections)}")
    num_repeated = len(profile.rows) - len({repr(row.fields) for row in profile.rows})
    if num_repeated:
        verb, pronoun = ("repeats", "it is") if num_repeated == 1 else ("repeat", "they are")
        share = profile.format_share(num_repeated)
        notes.append(f"{share} {verb} an earlier row exactly, so {pronoun} trained more than once")
    return notes


def _note_conflicts(documents: Sequence[Document]) -> list[str]:
    """Return a note if the first answers to the same prompt differ."""
    answers: dict[str, set[str]] = {}
    pairs = [tuple(segment.text for segment in document.segments[:2]) for document in documents]
    for prompt, *answer in pairs:
        answers.setdefault(prompt, set()).update(answer)
    count = sum(len(answers[prompt]) > 1 for prompt, *_ in pairs)
    if not count:
        return []
    share = f"{count:,} of {len(documents):,} rows"
    return [f"{share} have the same prompt as a row with another answer: all of these answers are trained"]


def _format_reasons(rejections: Rejections) -> str:
    reasons = list_reasons(rejections)
    if len(rejections.counts) == 1:
        return reasons[0].what
    return "; ".join(f"{reason.where} {reason.what}" for reason in reasons)


def add_notes(proposal: Proposal, *notes: str) -> Proposal:
    """Return the proposal with more notes."""
    return replace(proposal, notes=(*proposal.notes, *notes))
