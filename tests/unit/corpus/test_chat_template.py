"""The tokenizer's own chat template, rendered in a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.corpus import template_sandbox
from launcher.corpus.chat_template import TemplateRejectsError, TokenizerTemplate, make_tokenizer_template
from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.tokenizer import BaseTokenizer
from tests.unit.corpus.inputs import CHAT_TEMPLATE, write_base
from tests.unit.corpus.test_templates import ONE_TURN, TWO_TURNS, marked

LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template_of(folder: Path, source: str, end: str = "<|im_end|>", **settings: str) -> TokenizerTemplate:
    write_base(folder, template=source, settings={"eos_token": end, **settings})
    return make_tokenizer_template(BaseTokenizer(folder=folder))


def test_one_turn(tmp_path: Path) -> None:
    assert marked(template_of(tmp_path, CHAT_TEMPLATE), ONE_TURN) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHow many?\n\nFilm(title)<|im_end|>\n"
        "<|im_start|>assistant\n⟦42<|im_end|>⟧\n"
    )


def test_two_turns(tmp_path: Path) -> None:
    assert marked(template_of(tmp_path, CHAT_TEMPLATE), TWO_TURNS) == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦1<|im_end|>⟧\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧\n"
    )


def test_a_template_that_rewrites_history_trains_the_last_answer_only(tmp_path: Path) -> None:
    """Templates of thinking models keep thoughts in the last answer only and remove them from earlier ones."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    assert marked(template_of(tmp_path, source), TWO_TURNS) == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦2<|im_end|>⟧\n"
    )


def test_an_end_token_that_opens_the_text_is_not_the_end_of_an_answer(tmp_path: Path) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = template_of(tmp_path, source, end="<|endoftext|>", bos_token="<|endoftext|>")
    assert marked(template, TWO_TURNS) == "<|endoftext|>user: One?\nassistant: ⟦1\n⟧user: Two?\nassistant: ⟦2\n⟧"


def test_a_template_that_raises_refuses_the_row(tmp_path: Path) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateRejectsError, match=r"^the chat template rejects it: roles must alternate$"):
        template_of(tmp_path, source).render(ONE_TURN)


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages[99].content.x }}", "{{ 'x' + 1 }}", "{{ [][1][2] }}"])
def test_a_template_that_breaks_refuses_the_row(tmp_path: Path, source: str) -> None:
    with pytest.raises(TemplateRejectsError, match="the chat template rejects it"):
        template_of(tmp_path, source).render(ONE_TURN)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os.system('touch owned') }}",
        "{% for _ in range(10 ** 9) %}x{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_the_sandbox_holds(tmp_path: Path, attack: str) -> None:
    with pytest.raises(TemplateRejectsError, match="the chat template rejects it"):
        template_of(tmp_path, attack).render(ONE_TURN)


def test_error_of_invalid_template_names_its_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="invalid chat template: ") as caught:
        template_of(tmp_path, "{% for m in %}").render(ONE_TURN)
    assert str(tmp_path) in str(caught.value)


def test_generation_tags_and_loop_controls_are_understood(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}<|im_start|>{{ m.role }}\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}{% endfor %}" + PROMPT
    )
    assert marked(template_of(tmp_path, source), ONE_TURN) == (
        "<|im_start|>user\nHow many?\n\nFilm(title)<|im_end|>\n<|im_start|>assistant\n⟦42<|im_end|>⟧\n"
    )


def test_json_is_not_escaped_for_web_pages(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content | tojson }}<|im_end|>{% endfor %}"
    conversation = Conversation((Message("user", "a < b & 'ä'"), Message("assistant", "x")))
    assert "".join(part.text for part in template_of(tmp_path, source).render(conversation)) == (
        '"a < b & \'ä\'"<|im_end|>"x"<|im_end|>'
    )


def test_the_date_is_always_the_same(tmp_path: Path) -> None:
    source = "{{ strftime_now('%d %b %Y') }} " + LOOP + PROMPT
    assert marked(template_of(tmp_path, source), ONE_TURN).startswith("01 Jan 2024 <|im_start|>system")


@pytest.mark.parametrize(
    ("template", "settings", "missing"),
    [(None, {}, "chat template"), (CHAT_TEMPLATE, {"eos_token": None}, "eos_token")],
)
def test_what_is_missing_is_named_with_the_way_out(
    tmp_path: Path, template: str | None, settings: dict[str, None], missing: str
) -> None:
    write_base(tmp_path, template=template, settings=settings)
    with pytest.raises(InputError, match=f"the tokenizer has no {missing}") as caught:
        make_tokenizer_template(BaseTokenizer(folder=tmp_path))
    assert "one of chatml, qwen3, llama3, alpaca" in caught.value.hint


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.process
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 3000000000 }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 9 ** 99999999 }}",
        NESTED,
        "{{ 'a' * 60000000 }}",
    ],
)
def test_a_template_without_end_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    module = Path(template_sandbox.__file__).read_text()
    quick = tmp_path / "quick.py"
    quick.write_text(module.replace("_SECONDS = 10", "_SECONDS = 1"))
    monkeypatch.setattr(template_sandbox, "__file__", str(quick))
    monkeypatch.setattr(template_sandbox, "_SECONDS", 1)
    template_sandbox.check_template.cache_clear()
    with pytest.raises(InputError, match=r"cannot be used: it .*(memory|more than|timed out)") as caught:
        template_of(tmp_path / "base", source).render(ONE_TURN)
    assert "prompt_template" in caught.value.hint
    template_sandbox.check_template.cache_clear()


def test_a_row_that_makes_a_template_run_on_ends_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "_SECONDS", 1)
    source = "{% if messages[0].content == 'How many?' or messages|length == 3 %}" + NESTED + "{% endif %}" + LOOP
    template = template_of(tmp_path, source)
    with pytest.raises(InputError, match="takes more than 1 s for one row"):
        template.render(ONE_TURN)
