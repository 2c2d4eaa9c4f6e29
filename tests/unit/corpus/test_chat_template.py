"""The tokenizer's own chat template, rendered in a sandbox."""

from __future__ import annotations

import io
import json
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.corpus import chat_template, template_sandbox
from launcher.corpus.chat_template import TokenizerTemplate, make_tokenizer_template
from launcher.corpus.conversations import REASONING_KEYS, Conversation, Message
from launcher.corpus.rows import Json
from launcher.corpus.template_sandbox import TemplateRejectsError
from launcher.corpus.templates import CHATML
from launcher.corpus.tokenizer import BaseTokenizer
from tests.unit.corpus.families import FAMILIES, write_family
from tests.unit.corpus.inputs import CHAT_TEMPLATE, write_base
from tests.unit.corpus.test_templates import ONE_TURN, TWO_TURNS, marked


def check_here(source: str) -> str:
    """What the child process of check_template does, without the process and its limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(source))
        return "" if template_sandbox._main() == 0 else "refused"


@pytest.fixture(autouse=True)
def _check_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start child processes only in the tests of the limits: nearly every test has a template of its own."""
    if request.node.get_closest_marker("process") is None:
        monkeypatch.setattr(chat_template, "check_template", check_here)


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


def test_a_template_that_rewrites_history_trains_every_answer(tmp_path: Path) -> None:
    """Templates of thinking models keep thoughts in the last answer only and remove them from earlier ones."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    assert marked(template_of(tmp_path, source), TWO_TURNS) == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦1<|im_end|>⟧\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦2<|im_end|>⟧\n"
    )


def test_a_template_without_an_end_of_answers_is_refused(tmp_path: Path) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = template_of(tmp_path, source, end="<|endoftext|>", bos_token="<|endoftext|>")
    with pytest.raises(InputError, match="the chat template writes no end token after an answer"):
        _ = template.end_token


def test_a_template_that_raises_refuses_the_row(tmp_path: Path) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateRejectsError, match=r"^the chat template rejects the messages: roles must alternate$"):
        template_of(tmp_path, source).render(ONE_TURN)


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages[99].content.x }}", "{{ 'x' + 1 }}", "{{ [][1][2] }}"])
def test_a_template_that_breaks_refuses_the_row(tmp_path: Path, source: str) -> None:
    with pytest.raises(TemplateRejectsError, match="the chat template rejects the messages"):
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
    with pytest.raises(TemplateRejectsError, match="the chat template rejects the messages"):
        template_of(tmp_path, attack).render(ONE_TURN)


def test_error_of_invalid_template_names_its_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="invalid chat template: ") as caught:
        template_of(tmp_path, "{% for m in %}").render(ONE_TURN)
    assert str(tmp_path) in str(caught.value)


def test_generation_tags_and_loop_controls_are_understood(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% continue %}{% endif %}<|im_start|>"
        "{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}{% endfor %}" + PROMPT
    )
    assert marked(template_of(tmp_path, source), ONE_TURN) == (
        "Be brief.<|im_start|>user\nHow many?\n\nFilm(title)<|im_end|>\n<|im_start|>assistant\n⟦42<|im_end|>⟧\n"
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


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
@pytest.mark.parametrize("text", ["'a' * 3000000000", "'%03000000000d' % 1", "'x' | center(3000000000)"])
def test_a_template_that_needs_much_memory_for_one_row_only_is_stopped(tmp_path: Path, text: str) -> None:
    """The check before does not see such a row, and a constant is computed when the template is compiled."""
    template = template_of(
        tmp_path, f"{{% if messages[0].content == 'rare' %}}{{{{ {text} }}}}{{% endif %}}" + LOOP + PROMPT
    )
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert template.render(ONE_TURN)
    with pytest.raises(InputError, match="the chat template needs more than 1024 MiB for one row"):
        template.render(Conversation((Message("user", "rare"), Message("assistant", "x"))))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("source", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_a_template_that_writes_random_text_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises((InputError, TemplateRejectsError), match=r"No filter named 'random'|'lipsum' is undefined"):
        template_of(tmp_path, source + LOOP + PROMPT).render(ONE_TURN)


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


@pytest.mark.process
def test_a_template_that_passed_is_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_CACHE_DIR", str(tmp_path))
    sources = LOOP + PROMPT, "{{ 'a' * 60000000 }}"
    template_sandbox.check_template.cache_clear()
    first = [template_sandbox.check_template(source) for source in sources]
    assert first[0] == ""
    assert "more than" in first[1]
    template_sandbox.check_template.cache_clear()
    monkeypatch.setattr(template_sandbox, "_LIMITING_SHELL", ("/bin/sh", "-c", "echo it ran; exit 3"))
    assert [template_sandbox.check_template(source) for source in sources] == ["", "it ran"]
    template_sandbox.check_template.cache_clear()
    monkeypatch.setattr(template_sandbox, "__file__", __file__)  # another check
    assert template_sandbox.check_template(sources[0]) == "it ran"
    template_sandbox.check_template.cache_clear()


def test_a_row_that_makes_a_template_run_on_ends_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "_SECONDS", 1)
    source = "{% if messages[0].content == 'How many?' or messages|length == 3 %}" + NESTED + "{% endif %}" + LOOP
    template = template_of(tmp_path, source)
    with pytest.raises(InputError, match="takes more than 1 s for one row"):
        template.render(ONE_TURN)


WEATHER: Json = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TOOL_TURNS = Conversation(
    (
        Message("user", "Is it warm in Paris?"),
        Message(
            "assistant",
            "",
            tool_calls=(
                {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}},
            ),
        ),
        Message("tool", "21 degrees"),
        Message("assistant", "Yes."),
    ),
    (WEATHER,),
)


def test_tool_calls_are_trained_where_the_template_writes_them(tmp_path: Path) -> None:
    template = make_tokenizer_template(write_family(tmp_path, FAMILIES["qwen 2.5"]))
    text = marked(template, TOOL_TURNS)
    call = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
    assert text.startswith('<|im_start|>system\n# Tools\n{"type": "function", "function": {"name": "get_weather"')
    assert f"assistant\n⟦<tool_call>\n{call}\n</tool_call><|im_end|>⟧\n" in text
    assert "21 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦Yes.<|im_end|>⟧\n" in text


@pytest.mark.parametrize("family", ["smollm", "llama 3", "gemma", "mistral v3"])
def test_a_template_that_leaves_out_tool_calls_refuses_the_row(tmp_path: Path, family: str) -> None:
    template = make_tokenizer_template(write_family(tmp_path, FAMILIES[family]))
    with pytest.raises(TemplateRejectsError, match="tools"):
        template.render(TOOL_TURNS)
    calls_only = Conversation(TOOL_TURNS.messages)
    with pytest.raises(TemplateRejectsError, match="tool calls"):
        template.render(calls_only)


def test_arguments_of_numbers_that_are_left_out_are_noticed(tmp_path: Path) -> None:
    source = LOOP.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    )
    call: Json = {"type": "function", "function": {"name": "roll", "arguments": {"sides": 6}}}
    conversation = Conversation((Message("user", "Roll."), Message("assistant", "", tool_calls=(call,))))
    with pytest.raises(TemplateRejectsError, match="leaves out"):
        template_of(tmp_path, source + PROMPT).render(conversation)


def test_arguments_as_text_where_the_template_joins_them(tmp_path: Path) -> None:
    """DeepSeek's template adds the arguments to a text, and takes a message without content for one with calls."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is none %}"
        "{{ m.tool_calls[0].function.name + ' ' + m.tool_calls[0].function.arguments }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    call: Json = {"type": "function", "function": {"name": "roll", "arguments": {"die": "red"}}}
    conversation = Conversation((Message("user", "Roll."), Message("assistant", "", tool_calls=(call,))))
    assert '⟦roll {"die": "red"}<|im_end|>⟧' in marked(template_of(tmp_path, source + PROMPT), conversation)


def test_phi3_trains_every_answer_and_its_end_once(tmp_path: Path) -> None:
    template = make_tokenizer_template(write_family(tmp_path, FAMILIES["phi 3"]))
    assert marked(template, TWO_TURNS) == (
        "<|user|>\nOne?<|end|>\n<|assistant|>\n⟦1<|end|>⟧\n"
        "<|user|>\nTwo?<|end|>\n<|assistant|>\n⟦2<|end|>⟧\n<|endoftext|>"
    )


def test_gemma_ends_answers_with_its_turn(tmp_path: Path) -> None:
    template = make_tokenizer_template(write_family(tmp_path, FAMILIES["gemma"]))
    assert template.end_token == "<end_of_turn>"
    assert marked(template, TWO_TURNS).endswith("<start_of_turn>model\n⟦2<end_of_turn>⟧\n")


def test_a_template_that_takes_no_system_message_says_so(tmp_path: Path) -> None:
    template = make_tokenizer_template(write_family(tmp_path, FAMILIES["gemma"]))
    with pytest.raises(TemplateRejectsError, match=r"System role not supported \(it accepts no system message"):
        template.render(ONE_TURN)


def test_a_template_that_ignores_the_generation_prompt_does_not_train_headers(tmp_path: Path) -> None:
    assert marked(template_of(tmp_path, LOOP), TWO_TURNS).endswith("<|im_start|>assistant\n⟦2<|im_end|>⟧\n")


def test_answers_that_look_like_markers_are_found(tmp_path: Path) -> None:
    template = template_of(tmp_path, CHAT_TEMPLATE)
    conversation = Conversation((Message("user", "assistant"), Message("assistant", "user"), Message("user", "user")))
    assert marked(template, conversation).count("⟦user<|im_end|>⟧") == 1


THINKING = (  # as Qwen3's: thoughts only after the last question, and a prompt that can switch them off
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content %}"
    "{% set thoughts = m.reasoning_content or '' %}{% if '</think>' in text %}"
    "{% set thoughts = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thoughts) %}"
    "<think>\n{{ thoughts }}\n</think>\n\n{% endif %}{{ text }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function.name }} {{ c.function.arguments | tojson }}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_tool_calls_of_a_thinking_base_are_trained_from_their_beginning(tmp_path: Path) -> None:
    """Its prompt without thoughts is no beginning of such a turn."""
    text = marked(template_of(tmp_path, THINKING), TOOL_TURNS)
    call = '<tool_call>\nget_weather {"city": "Paris", "days": 2}\n</tool_call>'
    assert f"<|im_start|>assistant\n⟦{call}<|im_end|>⟧\n" in text
    assert "assistant\n<think>\n\n</think>\n\n⟦Yes.<|im_end|>⟧" in text


@pytest.mark.parametrize(
    "answer",
    [
        Message("assistant", "<think>\nEasy.\n</think>\n\nYes."),
        Message("assistant", "Yes.", keys=dict.fromkeys(REASONING_KEYS, "Easy.")),
    ],
)
def test_thoughts_are_trained_with_their_answer(tmp_path: Path, answer: Message) -> None:
    conversation = Conversation((Message("user", "Is it?"), answer))
    text = marked(template_of(tmp_path, THINKING), conversation)
    assert text.endswith("<|im_start|>assistant\n⟦<think>\nEasy.\n</think>\n\nYes.<|im_end|>⟧\n")
    twice = Conversation((*conversation.messages, Message("user", "Sure?"), answer))
    assert "assistant\n⟦Yes.<|im_end|>⟧" in marked(template_of(tmp_path, THINKING), twice), (
        "removed from earlier answers"
    )


def test_reasoning_that_the_template_leaves_out_refuses_the_row(tmp_path: Path) -> None:
    answer = Message("assistant", "Yes.", keys=dict.fromkeys(REASONING_KEYS, "Easy."))
    conversation = Conversation((Message("user", "Is it?"), answer))
    with pytest.raises(TemplateRejectsError, match="leaves out reasoning_content"):
        template_of(tmp_path, CHAT_TEMPLATE).render(conversation)
    with pytest.raises(TemplateRejectsError, match="reasoning_content, which the template chatml cannot write"):
        CHATML.render(conversation)


def test_the_result_of_a_tool_is_not_trained_if_it_repeats_the_name(tmp_path: Path) -> None:
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}<|im_start|>"
        "{% if m.role == 'tool' %}{{ messages[loop.index0 - 1].tool_calls[0].function.name }} to=assistant\n"
        "{{ m.content }}{% elif m.tool_calls %}assistant to={{ m.tool_calls[0].function.name }}\n"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.role }}\n{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    text = marked(template_of(tmp_path, source), TOOL_TURNS)
    assert '<|im_start|>assistant⟦ to=get_weather\n{"city": "Paris", "days": 2}<|im_end|>⟧\n' in text
    assert "<|im_start|>get_weather to=assistant\n21 degrees<|im_end|>\n<|im_start|>assistant⟦\nYes.<|im_end|>⟧" in text


def test_a_call_ends_with_the_token_that_closes_it(tmp_path: Path) -> None:
    """Gemma 4 has other tokens inside a call, and continues with the tool's result in the same turn."""
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<|tool_response>{{ m.content }}<tool_response|>"
        "{% elif m.tool_calls %}<|im_start|>assistant\n<|tool_call>{{ m.tool_calls[0].function.name }}:"
        "<|im_sep|>{{ m.tool_calls[0].function.arguments | tojson }}<|im_sep|>}<tool_call|>"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
    )
    template = template_of(tmp_path, source)
    names = ["<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|im_sep|>"]
    template.tokenizer.backend.add_special_tokens(names)
    text = marked(template, TOOL_TURNS)
    assert "assistant\n⟦<|tool_call>get_weather:<|im_sep|>" in text
    assert (
        "<|im_sep|>}<tool_call|>⟧<|tool_response>21 degrees<tool_response|><|im_start|>assistant\n⟦Yes.<|im_end|>⟧"
        in text
    )


def test_arguments_are_never_written_as_python_writes_them(tmp_path: Path) -> None:
    source = LOOP.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments }}{% endfor %}",
    )
    call: Json = {"type": "function", "function": {"name": "roll", "arguments": {"die": "red"}}}
    conversation = Conversation((Message("user", "Roll."), Message("assistant", "", tool_calls=(call,))))
    assert '⟦roll {"die": "red"}<|im_end|>⟧' in marked(template_of(tmp_path, source + PROMPT), conversation)


def test_json_takes_the_arguments_of_transformers(tmp_path: Path) -> None:
    source = LOOP + "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=true) }}"
    assert '{"a":1,"b":"\\u00e9"}' in marked(template_of(tmp_path, source), ONE_TURN)


def test_special_tokens_of_other_files_and_names_reach_the_template(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{{ sep_token }}{{ image_token }}{{ unk_token }}" + LOOP, sep_token="<S>")
    config = tmp_path / "tokenizer_config.json"
    settings = json.loads(config.read_text()) | {"extra_special_tokens": {"image_token": "<I>"}}
    del settings["eos_token"]
    config.write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "unk_token": "<U>"}')
    template = make_tokenizer_template(BaseTokenizer(folder=tmp_path))
    assert template.tokenizer.end_of_text == template.end_token == "<|im_end|>"
    assert marked(template, ONE_TURN).startswith("<S><I><U>")


@pytest.mark.parametrize("named", [False, True])
def test_rows_with_tools_use_the_template_for_tools(tmp_path: Path, named: bool) -> None:
    """As transformers: one of several named templates, or a file of its own."""
    template = template_of(tmp_path, CHAT_TEMPLATE)
    if named:
        config = tmp_path / "tokenizer_config.json"
        entries = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": THINKING}]
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": entries}))
    else:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(THINKING)
    template = make_tokenizer_template(BaseTokenizer(folder=tmp_path))
    assert "⟦<tool_call>\nget_weather" in marked(template, TOOL_TURNS)
    assert "think" not in marked(template, ONE_TURN)


def test_a_template_that_is_not_utf8_is_one_message(tmp_path: Path) -> None:
    write_base(tmp_path, template=None, settings={"eos_token": "<|im_end|>"})
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(InputError, match=r"chat_template\.jinja: not UTF-8 text"):
        make_tokenizer_template(BaseTokenizer(folder=tmp_path))


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("<|im_start|>", "{% if m.role == 'system' %}{% continue %}{% endif %}<|im_start|>", 1),
        # Mistral Nemo's: in the last message, if that is a question
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{% if loop.last %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_leaves_out_a_message_refuses_the_row(tmp_path: Path, source: str) -> None:
    template = template_of(tmp_path, source)
    with pytest.raises(TemplateRejectsError, match="leaves out a message of role system; move its text into the user"):
        template.render(ONE_TURN)
    template.render(TWO_TURNS)


def test_answers_that_follow_each_other_are_counted_one_by_one(tmp_path: Path) -> None:
    """DeepSeek's template writes nothing between them."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_sep|>"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    conversation = Conversation((Message("user", "One?"), Message("assistant", "1"), Message("assistant", "2")))
    text = marked(template_of(tmp_path, source), conversation)
    assert text == "<|im_start|>One?<|im_sep|>⟦1<|im_end|>⟧⟦2<|im_end|>⟧"


def test_an_answer_before_a_system_message_is_trained_with_its_end(tmp_path: Path) -> None:
    """DeepSeek's template puts all system messages at the beginning."""
    source = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        + LOOP.replace("in messages", "in messages if m.role != 'system'")
        + PROMPT
    )
    conversation = Conversation((*TWO_TURNS.messages[:2], Message("system", "Short."), *TWO_TURNS.messages[2:]))
    text = marked(template_of(tmp_path, source), conversation)
    assert text.startswith("Short.<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦1<|im_end|>⟧\n")


def test_thoughts_in_the_last_answer_that_the_template_removes_refuse_the_row(tmp_path: Path) -> None:
    """Templates of DeepSeek R1's kind remove them from every answer."""
    source = LOOP.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim }}")
    template = template_of(tmp_path, source + PROMPT)
    answer = Message("assistant", "<think>\nEasy.\n</think>\n\nYes.")
    with pytest.raises(TemplateRejectsError, match="leaves out the text before </think>"):
        template.render(Conversation((Message("user", "Is it?"), answer)))
    early = Conversation((Message("user", "Is it?"), answer, *TWO_TURNS.messages))
    assert "assistant\n⟦Yes.<|im_end|>⟧\n" in marked(template, early)


def test_the_end_is_the_last_token_of_an_answer_if_the_tokenizer_says_so(tmp_path: Path) -> None:
    """Command R7B closes the text and then the turn; a tool call is closed by another token, and then the turn."""
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}"
        "{% if m.tool_calls %}<|call|>{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call_end|>{% else %}<|text|>{{ m.content }}<|text_end|>"
        "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    template = template_of(tmp_path, source)
    template.tokenizer.backend.add_special_tokens(["<|text|>", "<|text_end|>", "<|call|>", "<|call_end|>"])
    assert template.end_token == "<|im_end|>"
    text = marked(template, TOOL_TURNS)
    assert '⟦<|call|>get_weather{"city": "Paris", "days": 2}<|call_end|><|im_end|>⟧' in text
    assert text.endswith("⟦<|text|>Yes.<|text_end|><|im_end|>⟧")


@pytest.mark.parametrize("other", ["<|end|>", "<|end|>\n", ""])
def test_a_token_at_which_no_server_stops_is_no_end_of_an_answer(tmp_path: Path, other: str) -> None:
    """In gpt-oss, <|return|> ends the last answer, and <|end|> the answers before it."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}" + other + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    template = template_of(tmp_path, source, end="<|return|>")
    template.tokenizer.backend.add_special_tokens(["<|end|>", "<|return|>"])
    text = marked(template, TWO_TURNS)
    assert f"<|im_start|>assistant⟦<|im_sep|>1⟧{other}<|im_start|>user" in text
    assert text.endswith("<|im_start|>assistant⟦<|im_sep|>2<|return|>⟧")


def test_a_call_without_arguments_ends_where_its_turn_ends(tmp_path: Path) -> None:
    """In gpt-oss, other tokens stand between the tool's name and its arguments."""
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}<|im_start|>"
        "{% if m.tool_calls %}assistant to={{ m.tool_calls[0].function.name }}<|im_sep|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}{{ m.role }}<|im_sep|>{{ m.content }}"
        "<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    template = template_of(tmp_path, source)
    template.tokenizer.backend.add_special_tokens(["<|call|>"])
    call: Json = {"type": "function", "function": {"name": "roll", "arguments": {}}}
    messages = (Message("user", "Roll."), Message("assistant", "", tool_calls=(call,)), Message("tool", "6"))
    assert "<|im_start|>assistant⟦ to=roll<|im_sep|>{}<|call|>⟧<|im_start|>tool" in marked(
        template, Conversation(messages)
    )


def test_the_result_of_a_tool_inside_an_answer_is_not_trained(tmp_path: Path) -> None:
    """Gemma 4 writes the text of a message with a tool call after the tool's result."""
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{% if m.role != 'tool' %}"
        "<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }} {{ messages[loop.index].content }} {% endif %}"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
    )
    messages = list(TOOL_TURNS.messages)
    index = next(index for index, message in enumerate(messages) if message.tool_calls)
    messages[index] = replace(messages[index], content="Let me look.")
    text = marked(template_of(tmp_path, source), Conversation(tuple(messages), TOOL_TURNS.tools))
    assert "21 degrees Let me look.<|im_end|>\n" in text
    assert text.count("⟦") == 1
    assert "⟦Yes.<|im_end|>⟧" in text


def test_an_answer_of_thoughts_only_is_trained(tmp_path: Path) -> None:
    conversation = Conversation((Message("user", "Is it?"), Message("assistant", "Easy. </think>")))
    assert "assistant\n⟦Easy. </think><|im_end|>⟧" in marked(template_of(tmp_path, CHAT_TEMPLATE), conversation)
