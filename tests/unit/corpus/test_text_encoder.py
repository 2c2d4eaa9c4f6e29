"""Trained tokens are those that the base's own tokenizer makes of the whole text, with the right mask."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from launcher.core.errors import InputError
from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.documents import make_template
from launcher.corpus.templates import Segment, Template
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenizer import BaseTokenizer
from tests.unit.corpus.families import FAMILIES, PUBLISHED, find_published, write_family

WORDS = (
    "MATCH (n)",
    "How many",
    "ä",
    "漢字",
    "😀",
    "e\u0301",
    " ",
    "  ",
    "\n",
    "\n\n",
    "'s",
    "12345",
    "x",
    "<",
    "|>",
    "###",
)
CONTROLS = (
    *("<|im_end|>", "<|im_start|>", "</s>", "<s>", "<bos>", "<end_of_turn>", "<|eot_id|>", "[INST]", "<|end|>"),
    *("<\uff5cUser\uff5c>", "<\uff5cend▁of▁sentence\uff5c>", "<|endoftext|>", "<|user|>", "<unk>"),
)


def make_texts(words: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(words), min_size=1, max_size=8).map("".join).filter(lambda text: bool(text.strip()))


def make_conversations(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Conversation]:
    turn = st.tuples(
        st.builds(Message, st.just("user"), texts, st.just("") | texts), st.builds(Message, st.just("assistant"), texts)
    )
    turns = st.lists(turn, min_size=1, max_size=3).map(
        lambda pairs: tuple(message for pair in pairs for message in pair)
    )
    system = st.just(()) | texts.map(lambda text: (Message("system", text),))
    return st.builds(lambda first, rest: Conversation((*first, *rest)), system, turns)


plain = make_conversations(make_texts(WORDS))
hostile = make_conversations(make_texts((*WORDS, *CONTROLS)))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseTokenizer]:
    folder = tmp_path_factory.mktemp("families")
    return {name: write_family(folder / name, family) for name, family in FAMILIES.items()}


def load_reference(base: BaseTokenizer) -> Any:
    """The tokenizer as transformers uses it."""
    settings = {key: value for key in ("bos_token", "eos_token") if (value := base.special_token(key))}
    return PreTrainedTokenizerFast(
        tokenizer_file=str(base.folder / "tokenizer.json"), chat_template=base.chat_template, **settings
    )


def encode(base: BaseTokenizer, template: Template, conversation: Conversation) -> tuple[list[int], list[bool]]:
    segments = template.render(conversation)
    parts = [np.frombuffer(part, dtype=np.int32).tolist() for part in TextEncoder(base, template).encode([segments])]
    mask = [segment.is_trained for segment, part in zip(segments, parts, strict=True) for _ in part]
    return [token for part in parts for token in part], mask


def fit(conversation: Conversation, *, takes_system: bool) -> Conversation:
    messages = conversation.messages
    return conversation if takes_system else Conversation(tuple(m for m in messages if m.role != "system"))


def as_turns(conversation: Conversation) -> list[dict[str, str]]:
    contexts = [f"\n\n{message.context}" if message.context else "" for message in conversation.messages]
    pairs = zip(conversation.messages, contexts, strict=True)
    return [{"role": message.role, "content": message.content + context} for message, context in pairs]


def check_mask(base: BaseTokenizer, template: Template, made: tuple[list[int], list[bool]], answers: list[str]) -> None:
    """Every answer is trained up to its end token, which occurs once; nothing else is."""
    end = base.backend.token_to_id(template.end_token)
    assert end is not None
    runs = [
        [token for (token, _) in run]
        for is_trained, run in groupby(zip(*made, strict=True), lambda x: x[1])
        if is_trained
    ]
    assert [run.count(end) for run in runs] == [1] * len(answers)
    assert [run[-1] for run in runs] == [end] * len(answers)
    for run, answer in zip(runs, answers, strict=True):
        wanted = "".join(base.backend.normalizer.normalize_str(answer) if base.backend.normalizer else answer)
        text = base.backend.decode(run[:-1], skip_special_tokens=False)
        assert "".join(wanted.replace("▁", " ").split()) == "".join(text.replace("▁", " ").split())


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12)
@given(conversation=plain)
def test_chat_templates_give_the_tokens_of_transformers(
    bases: dict[str, BaseTokenizer], name: str, conversation: Conversation
) -> None:
    base, family = bases[name], FAMILIES[name]
    template, conversation = make_template("tokenizer", base), fit(conversation, takes_system=family.takes_system)
    assert template.end_token == family.end
    made = encode(base, template, conversation)
    reference = load_reference(base).apply_chat_template(
        as_turns(conversation), enable_thinking=False, return_dict=False
    )
    assert made[0] == reference
    check_mask(base, template, made, [m.content for m in conversation.messages if m.role == "assistant"])


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12)
@given(conversation=plain)
def test_alpaca_gives_the_tokens_of_transformers(
    bases: dict[str, BaseTokenizer], name: str, conversation: Conversation
) -> None:
    base = bases[name]
    template = make_template("alpaca", base)
    made = encode(base, template, conversation)
    text = "".join(segment.text for segment in template.render(conversation))
    assert made[0] == load_reference(base)(text).input_ids
    check_mask(base, template, made, [m.content for m in conversation.messages if m.role == "assistant"])


@pytest.mark.parametrize("template_name", ["tokenizer", "alpaca"])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12)
@given(conversation=hostile)
def test_fields_never_become_control_tokens(
    bases: dict[str, BaseTokenizer], name: str, template_name: str, conversation: Conversation
) -> None:
    base, family = bases[name], FAMILIES[name]
    template = make_template(template_name, base)
    if template_name == "tokenizer":
        conversation = fit(conversation, takes_system=family.takes_system)
    harmless = Conversation(tuple(Message(m.role, "x", "x" if m.context else "") for m in conversation.messages))
    ids, mask = encode(base, template, conversation)
    controls = {base.backend.token_to_id(control) for control in template.controls.names}
    assert [token for token in ids if token in controls] == [
        token for token in encode(base, template, harmless)[0] if token in controls
    ]
    check_mask(base, template, (ids, mask), [m.content for m in conversation.messages if m.role == "assistant"])


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10)
@given(conversation=hostile)
def test_prompts_begin_as_in_training(bases: dict[str, BaseTokenizer], name: str, conversation: Conversation) -> None:
    base = bases[name]
    template = make_template("tokenizer", base)
    segments = template.render(fit(conversation, takes_system=FAMILIES[name].takes_system))
    prompt = TextEncoder(base, template).encode_prompt(segments[0].text)
    whole = np.frombuffer(b"".join(TextEncoder(base, template).encode([segments])), dtype=np.int32).tolist()
    # A blank at the beginning of the answer may be part of the last token of the prompt.
    assert prompt[:-2] == whole[: len(prompt) - 2]


@pytest.mark.parametrize(
    ("name", "template_name", "expected"),
    [
        ("gemma", "alpaca", ["<bos>"]),
        ("llama 3", "alpaca", ["<|begin_of_text|>"]),
        ("llama 3", "llama3", ["<|begin_of_text|>"]),
        ("llama 3", "tokenizer", ["<|begin_of_text|>"]),
        ("qwen 2.5", "chatml", []),
        ("mistral v3", "tokenizer", ["<s>"]),
    ],
)
def test_bos_stands_once_where_the_tokenizer_adds_it(
    bases: dict[str, BaseTokenizer], name: str, template_name: str, expected: list[str]
) -> None:
    base = bases[name]
    conversation = Conversation((Message("user", "One?"), Message("assistant", "1")))
    ids, mask = encode(base, make_template(template_name, base), conversation)
    bos = {base.backend.token_to_id(token) for token in ("<bos>", "<|begin_of_text|>", "<s>")}
    assert [base.backend.id_to_token(token) for token in ids if token in bos] == expected
    assert not expected or (base.backend.id_to_token(ids[0]) == expected[0] and not mask[0])


def test_no_prefix_inside_a_text(bases: dict[str, BaseTokenizer]) -> None:
    """SentencePiece's dummy prefix is at the beginning of a text only."""
    base = bases["llama 2"]
    template = make_template("alpaca", base)
    ids, mask = encode(base, template, Conversation((Message("user", "One?"), Message("assistant", "MATCH"))))
    trained = [base.backend.id_to_token(token) for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert trained[0] is not None
    assert not trained[0].startswith("▁")


def test_a_segment_is_cut_where_it_ends(bases: dict[str, BaseTokenizer]) -> None:
    """A token with text of both segments belongs to the trained one."""
    base = bases["smollm"]
    template = make_template("alpaca", base)
    parts = TextEncoder(base, template).encode([(Segment("x\n", False), Segment("\ny", True), Segment("  ", False))])
    texts = [base.backend.decode(np.frombuffer(part, dtype=np.int32).tolist()) for part in parts]
    assert "".join(texts) == "x\n\ny  "
    assert "y" in texts[1]


def test_a_normalized_control_token_is_encoded_as_the_base_does(tmp_path: Path) -> None:
    """SentencePiece's prefix is part of such a token's name, so that the base does not find it everywhere."""
    base = write_family(tmp_path, FAMILIES["llama 2"])
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["normalized"] = token["content"] == "</s>"
    file.write_text(json.dumps(content))
    base = BaseTokenizer(folder=tmp_path)
    template = make_template("tokenizer", base)
    conversation = Conversation((Message("user", "How many?"), Message("assistant", "Two.")))
    text = "".join(segment.text for segment in template.render(conversation))
    ids = encode(base, template, conversation)[0]
    assert ids == load_reference(base)(text, add_special_tokens=False).input_ids
    assert encode(base, template, conversation)[0] == ids, "no random name is encoded"


@pytest.mark.parametrize("name", ["user", "<|im"])
def test_an_added_token_that_is_part_of_a_marker_is_no_control_token(tmp_path: Path, name: str) -> None:
    base = write_family(tmp_path, FAMILIES["smollm"])
    base.backend.add_tokens([name])
    template = make_template("tokenizer", base)
    conversation = Conversation((Message("user", f"The user of {name}?"), Message("assistant", "x")))
    text = "".join(segment.text for segment in template.render(conversation))
    assert template.controls.unescape(text) == text
    assert encode(base, template, conversation)[0] == base.backend.encode(text, add_special_tokens=False).ids


# The published files of families: tokens as transformers makes them of the same text, if the files are on this machine.

needs_files = pytest.mark.skipif(find_published() is None, reason="LAUNCHER_TOKENIZERS names no folder with tokenizers")


@needs_files
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers(name: str) -> None:
    folder = find_published()
    assert folder is not None
    base = BaseTokenizer(folder=folder / name)
    reference = load_reference(base)
    checked = 0
    for template_name in ("tokenizer", "alpaca", "chatml"):
        try:
            template = make_template(template_name, base)
        except InputError:
            continue
        _check_published(base, template, reference)
        checked += 1
    assert checked, "at least alpaca fits"


def _check_published(base: BaseTokenizer, template: Template, reference: Any) -> None:
    encoder = TextEncoder(base, template)

    @settings(max_examples=40)
    @given(conversation=plain.map(lambda whole: fit(whole, takes_system=False)))
    def check(conversation: Conversation) -> None:
        segments = template.render(conversation)
        ids = np.frombuffer(b"".join(encoder.encode([segments])), dtype=np.int32).tolist()
        text = "".join(segment.text for segment in segments)
        # Some post-processors also add an end, which is the template's to write.
        assert ids == reference(text, add_special_tokens=encoder.adds_bos(text)).input_ids[: len(ids)]
        assert sum(segment.is_trained for segment in segments) == sum(
            m.role == "assistant" for m in conversation.messages
        )
        assert all(s.text.endswith(template.end_token) for s in segments if s.is_trained)

    check()


def test_families_are_written_as_asked(tmp_path: Path) -> None:
    base = write_family(tmp_path, FAMILIES["gemma"], eos_token="<end_of_turn>")
    assert base.end_of_text == "<end_of_turn>"
    assert base.bos_ids == [base.backend.token_to_id("<bos>")]
