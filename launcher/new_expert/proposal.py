"""Everything that a manifest of a new expert says, proposed from its rows, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.bases import last_component
from launcher.corpus.audit import SampleSegment, make_sample
from launcher.corpus.build import is_cut_for_validation
from launcher.corpus.conversations import Conversation
from launcher.corpus.documents import Document, DocumentMaker, make_template
from launcher.corpus.markers import find_dialect, parse_conversation
from launcher.corpus.questions import find_question
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.templates import Template
from launcher.corpus.tokenizer import BaseTokenizer, load_tokenizer
from launcher.errors import InputError
from launcher.new_expert.answers import Language, ask_judge, find_language
from launcher.new_expert.roles import GivenFields, Guess, Roles, check_usable, guess_roles
from launcher.new_expert.seeing import Seen, spread
from launcher.new_expert.sizes import Sizes, choose_sizes
from launcher.quality.judging import Question
from launcher.rows import BYTES_PER_TOKEN
from launcher.shapes import ModelShape, load_shape

DEFAULT_BASE = "Qwen/Qwen3-0.6B"
NO_TASK = "text"  # --task: answers that nobody here can judge
_JUDGED_ROWS = 400
_LEAST_HELD_OUT, _MOST_HELD_OUT = 1, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the user said. None: to be guessed."""

    fields: GivenFields | None = None
    base: str | None = None
    template: str | None = None
    task: str | None = None
    validation: Path | None = None
    test: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """One row as it is trained: what of it is learnt."""

    row: int
    segments: tuple[SampleSegment, ...]
    num_tokens: int
    num_trained: int
    tokenizer: str  # whose tokens are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    seen: Seen
    roles: Roles
    base: ModelShape
    template: str
    template_why: str
    loss_on_all: bool
    language: Language | None
    sizes: Sizes
    num_rows: int
    num_held_out: int | None  # None: a file of its own, or none can be held out
    wishes: Wishes
    mask: Mask
    notes: tuple[str, ...]

    @property
    def holds_out(self) -> bool:
        return self.num_held_out is not None or self.wishes.validation is not None

    @property
    def guesses(self) -> tuple[Guess, ...]:
        """In the order in which they are told."""
        base_why = (
            "as given" if self.wishes.base is not None else "the base of this project's experts; --base changes it"
        )
        sizes = self.sizes
        return (
            *self.roles.guesses,
            Guess(what="base", value=self.base.name, why=base_why),
            Guess(what="template", value=self.template, why=self.template_why),
            Guess(what="trained", value="every token" if self.loss_on_all else "the answers", why=self._loss_why()),
            Guess(what="held out", value=self._held_out(), why=self._held_out_why()),
            Guess(what="judge", value=self.language.name if self.language else "nobody", why=self._judge_why()),
            Guess(what="sequence", value=f"{sizes.max_seq_length:,} tokens", why=sizes.length_why),
            Guess(what="batch", value=f"{sizes.global_batch_size} sequences", why=sizes.batch_why),
            Guess(what="epochs", value=f"{sizes.epochs:g}", why=sizes.epochs_why),
        )

    def _loss_why(self) -> str:
        return (
            "there is no answer to tell from a question" if self.loss_on_all else "and their end; prompts are only read"
        )

    def _held_out(self) -> str:
        if self.wishes.validation is not None:
            return self.wishes.validation.name
        return "nothing" if self.num_held_out is None else self.seen.share(self.num_held_out)

    def _held_out_why(self) -> str:
        if self.wishes.validation is not None:
            return "as given"
        if self.num_held_out is None:
            return "the prompts are too few, or too much alike, to hold some out by their hash"
        return "a tenth, by a hash of the prompt: one question is never on both sides"

    def _judge_why(self) -> str:
        if self.language is not None:
            return self.language.why
        if self.wishes.task is not None:
            return "as given by --task"
        return "the answers are neither JSON nor SQL, Cypher or TypeScript; evaluation.judge_command takes a program"


def make_proposal(seen: Seen, wishes: Wishes, folders: tuple[Path, ...]) -> Proposal:
    roles = guess_roles(seen, wishes.fields)
    check_usable(seen, roles)
    base = load_shape(wishes.base or DEFAULT_BASE, folders)
    name, why = _choose_template(base, wishes.template)
    tokenizer = load_tokenizer(base.name, folders, any_will_do=True)
    template = _find_template(name, tokenizer)
    trains_all = roles.kind == "text"
    maker = DocumentMaker(reader=roles.reader, template=template, trains_all=trains_all)
    made = [(row, document) for row in seen.rows if isinstance(document := maker.make(row), Document)]
    _check_variety(made, seen)
    num_rows = _count_rows(seen)
    language = None if trains_all else _find_language(wishes.task, made, roles, template)
    sizes = choose_sizes([_estimate_tokens(document) for _, document in made], num_rows, base.max_positions)
    return Proposal(
        seen=seen,
        roles=roles,
        base=base,
        template=name,
        template_why=why,
        loss_on_all=trains_all,
        language=language,
        sizes=sizes,
        num_rows=num_rows,
        num_held_out=_count_held_out([document for _, document in made]),
        wishes=wishes,
        mask=_make_mask([document for _, document in made], tokenizer, base.name),
        notes=(*_note_bad(seen, len(made)), *roles.notes, *(language.notes if language else ())),
    )


def _choose_template(base: ModelShape, wanted: str | None) -> tuple[str, str]:
    """By the family: those whose tokens are known here, else the tokenizer's own where the name says that it chats."""
    if wanted is not None:
        return wanted, "as given"
    if base.model_type.startswith("qwen") or base.name.startswith("launcher/"):
        return "chatml", f"the markers that {last_component(base.name)} knows"
    if re.search(r"llama-?3", base.name.lower()):
        return "llama3", "the markers that Llama 3 knows"
    words = re.split(r"[^a-z0-9]+", base.name.lower())
    if {"instruct", "it", "chat"} & set(words) or base.model_type == "smollm3":
        return "tokenizer", "the base's own chat template"
    return "alpaca", "headlines: this base has no chat template that is known here"


def _find_template(name: str, tokenizer: BaseTokenizer) -> Template:
    """Where the base's own tokenizer is not on this machine, markers that the embedded one lacks are only shown."""
    try:
        return make_template(name, tokenizer)
    except InputError:
        if tokenizer.folder != load_tokenizer("launcher/tiny", ()).folder:
            raise
        return make_template("chatml", tokenizer)


def _check_variety(made: Sequence[tuple[Row, Document]], seen: Seen) -> None:
    whole = {"".join(segment.text for segment in document.segments) for _, document in made}
    if len(whole) < 2:
        told = "there is only one row" if len(made) == 1 else f"all {len(made):,} rows are alike"
        raise InputError(
            f"{seen.source.path}: {told}: there is nothing to learn but that one",
            hint="are prompt and answer the right fields? --prompt-field and --answer-field name others; rows have: "
            + ", ".join(seen.fields),
        )
    if len({document.prompt_hash for _, document in made}) == 1:
        raise InputError(
            f"{seen.source.path}: all {len(made):,} rows ask the same, and have {len(whole):,} different answers",
            hint="a field is missing from the prompt: --prompt-field or --context-field names it; rows have: "
            + ", ".join(seen.fields),
        )


def _count_rows(seen: Seen) -> int:
    """Beyond those looked at, by the size of the file."""
    if seen.is_whole:
        return len(seen.rows)
    if seen.source.format == "parquet":
        from launcher.corpus.sources import count_parquet_rows

        return count_parquet_rows(seen.source.path)
    read = sum(len(str(row.fields)) for row in seen.rows) / len(seen.rows)
    return max(len(seen.rows), round(seen.source.path.stat().st_size / max(1.0, read)))


def _estimate_tokens(document: Document) -> float:
    return sum(len(segment.text.encode()) for segment in document.segments) / BYTES_PER_TOKEN


def _count_held_out(documents: Sequence[Document]) -> int | None:
    """By preparing's own rule. None: it would hold out none, or most."""
    count = sum(is_cut_for_validation(document.prompt_hash) for document in documents)
    return count if _LEAST_HELD_OUT <= count <= _MOST_HELD_OUT * len(documents) else None


def _find_language(
    task: str | None, made: Sequence[tuple[Row, Document]], roles: Roles, template: Template
) -> Language | None:
    if task == NO_TASK:
        return None
    documents = {row.number: document for row, document in made}
    rows = spread([row for row, _ in made], _JUDGED_ROWS)
    questions = [_make_question(row, documents[row.number], roles, template) for row in rows]
    if task is None:
        return find_language(questions)
    told = ask_judge(task, questions, "as given by --task")
    if told is not None:
        return told
    return Language(name=task, why="as given by --task", notes=(f"most answers of the rows do not parse as {task}",))


def _make_question(row: Row, document: Document, roles: Roles, template: Template) -> Question:
    """As held-out rows are asked: the first answer, and the user's words before it."""
    content = roles.reader.read(row)
    assert not isinstance(content, BadRow), "the document was made from it"
    if isinstance(content, Conversation):
        conversation: Conversation | None = content
    else:
        dialect = find_dialect(content.text)
        conversation = None if dialect is None else parse_conversation(content.text, dialect)
    instruction, context = find_question(conversation, document.segments[0].text)
    answer = next((segment.text for segment in document.segments if segment.is_trained), "")
    return Question(instruction=instruction, context=context, reference=answer.removesuffix(template.end_token).strip())


def _make_mask(documents: Sequence[Document], tokenizer: BaseTokenizer, base: str) -> Mask:
    """Of a row of middling length: the first is often an odd one."""
    ordered = sorted(documents[:200], key=_estimate_tokens)
    document = ordered[len(ordered) // 2]
    counts = [
        (len(tokenizer.backend.encode(segment.text, add_special_tokens=False).ids), segment.is_trained)
        for segment in document.segments
    ]
    is_embedded = tokenizer.folder == load_tokenizer("launcher/tiny", ()).folder
    return Mask(
        row=document.row,
        segments=make_sample(document),
        num_tokens=sum(count for count, _ in counts),
        num_trained=sum(count for count, is_trained in counts if is_trained),
        tokenizer="the embedded tiny base" if is_embedded else base,
    )


def _note_bad(seen: Seen, num_made: int) -> list[str]:
    notes = []
    if seen.bad_rows:
        first = seen.bad_rows[0]
        notes.append(f"{len(seen.bad_rows):,} rows cannot be read: {first.reason} (line {first.number})")
    if num_made < len(seen.rows):
        notes.append(
            f"{len(seen.rows) - num_made:,} of {len(seen.rows):,} rows cannot be used; `launcher prepare` says why"
        )
    return notes


def with_notes(proposal: Proposal, *notes: str) -> Proposal:
    return replace(proposal, notes=(*proposal.notes, *notes))
