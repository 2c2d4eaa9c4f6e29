"""Everything that a manifest of a new expert says, proposed from its rows, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.corpus.build import is_cut_for_validation
from launcher.corpus.conversations import Conversation
from launcher.corpus.documents import Document, DocumentMaker
from launcher.corpus.markers import find_dialect, parse_conversation
from launcher.corpus.questions import find_question
from launcher.corpus.rows import BadRow, Rejections, Row
from launcher.corpus.templates import Template
from launcher.corpus.tokenizer import load_tokenizer
from launcher.errors import InputError
from launcher.new_expert.answers import Language, ask_judge, find_language
from launcher.new_expert.guesses import GivenFields, Guess, Roles, list_reasons
from launcher.new_expert.mask import Mask, count_answerless, estimate_tokens, make_mask
from launcher.new_expert.roles import check_usable, guess_roles
from launcher.new_expert.seeing import Seen, spread
from launcher.new_expert.sizes import Sizes, choose_sizes
from launcher.new_expert.templating import choose_template
from launcher.quality.judging import Question
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
class Proposal:
    seen: Seen
    roles: Roles
    maker: DocumentMaker
    prompt_hashes: frozenset[int]  # of the rows that can be used
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
            *([Guess(what="test", value=self.wishes.test.name, why="as given by --test")] if self.wishes.test else []),
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
            return "as given by --validation"
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
    if wishes.base is not None and not wishes.base.strip():
        raise InputError("--base: an empty name is no base model", hint=f"leave it out, and it is {DEFAULT_BASE}")
    roles = guess_roles(seen, wishes.fields)
    check_usable(seen, roles)
    base = load_shape(wishes.base or DEFAULT_BASE, folders)
    tokenizer = load_tokenizer(base.name, folders, any_will_do=True)
    template = choose_template(base, wishes.template, tokenizer)
    trains_all = roles.kind == "text"
    maker = DocumentMaker(reader=roles.reader, template=template.shown, trains_all=trains_all)
    made, rejections = make_documents(maker, seen.rows)
    documents = [document for _, document in made]
    _check_variety(made, seen)
    num_rows = _count_rows(seen)
    language = None if trains_all else _find_language(wishes.task, made, roles, template.shown)
    sizes = choose_sizes([estimate_tokens(document) for document in documents], num_rows, base.max_positions)
    mask = make_mask(
        documents,
        tokenizer,
        base=base.name,
        template=template.shown.name if template.shown_note else template.name,
        template_note=template.shown_note,
        max_length=sizes.max_seq_length,
    )
    notes = (
        *seen.notes,
        *note_bad(seen, rejections),
        *roles.notes,
        *template.notes,
        *_note_answerless(documents, sizes),
        *(language.notes if language else ()),
    )
    return Proposal(
        seen=seen,
        roles=roles,
        maker=maker,
        prompt_hashes=frozenset(document.prompt_hash for document in documents),
        base=base,
        template=template.name,
        template_why=template.why,
        loss_on_all=trains_all,
        language=language,
        sizes=sizes,
        num_rows=num_rows,
        num_held_out=_count_held_out(documents),
        wishes=wishes,
        mask=mask,
        notes=notes,
    )


def make_documents(maker: DocumentMaker, rows: Sequence[Row]) -> tuple[list[tuple[Row, Document]], Rejections]:
    made, rejections = [], Rejections()
    for row in rows:
        document = maker.make(row)
        if isinstance(document, BadRow):
            rejections.add(document)
        else:
            made.append((row, document))
    return made, rejections


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


def note_bad(seen: Seen, rejections: Rejections) -> list[str]:
    notes = []
    if seen.bad_rows:
        unread = Rejections()
        for row in seen.bad_rows:
            unread.add(row)
        notes.append(f"{unread.total:,} rows cannot be read: {_tell_reasons(unread)}")
    if rejections.total:
        notes.append(f"{seen.share(rejections.total)} cannot be used: {_tell_reasons(rejections)}")
    return notes


def _tell_reasons(rejections: Rejections) -> str:
    """One reason needs no count of its own."""
    told = list_reasons(rejections)
    return told[0].what if len(rejections.counts) == 1 else "; ".join(f"{one.where} {one.what}" for one in told)


def _note_answerless(documents: Sequence[Document], sizes: Sizes) -> list[str]:
    count = count_answerless(documents, sizes.max_seq_length)
    told = f"in {count:,} of {len(documents):,} rows the answer begins beyond the {sizes.max_seq_length:,} tokens"
    return [f"{told} of a sequence: nothing of them is trained"] if count else []


def with_notes(proposal: Proposal, *notes: str) -> Proposal:
    return replace(proposal, notes=(*proposal.notes, *notes))
