"""How exported models are served: commands of vLLM, llama.cpp and Ollama, and Ollama's Modelfile."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.core.errors import InputError
from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.documents import make_planned_template
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.manifest import Manifest
from launcher.manifest.model import Decoding
from launcher.plan.model import Plan
from launcher.training.inference.prompt import PLACEHOLDERS, render_prompt

_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank
_MIN_CONTEXT = 4096  # Ollama's default
_UNLIMITED = 1 << 31
_PROMPT, _SYSTEM, _ANSWER = PLACEHOLDERS[:3]


def name_model(expert: str) -> str:
    """Return the expert's name as servers and file systems accept it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", expert).strip("-._")[:60] or "expert"


def uses_own_template(plan: Plan) -> bool:
    """Return whether the training used another chat template than the base's."""
    return plan.data.prompt_template != "tokenizer" or plan.data.chat_template is not None


def list_vllm_obstacles(plan: Plan) -> list[str]:
    """Return the features of an adapter that vLLM cannot serve, such as DoRA or new tokens; empty if there are none."""
    adapter = plan.adapter
    obstacles = [] if adapter.kind == "lora" else [f"{adapter.kind} adapters"]
    obstacles += ["completely trained modules"] if adapter.modules_to_save else []
    obstacles += ["adapters of stacked experts"] if adapter.target_parameters else []
    return obstacles + (["new tokens"] if plan.data.new_tokens else [])


def render_vllm(plan: Plan, base: str, *, is_adapter: bool) -> str:
    """Return the vLLM command that serves the merged model or adapter in the current folder."""
    name, trusted = name_model(plan.expert), " --trust-remote-code" if plan.trust_remote_code else ""
    if not is_adapter:
        return f"vllm serve . --served-model-name {name}{trusted}"
    rank = (plan.adapter.rank or 1) * (2 if (plan.adapter.init_lora_weights or "").startswith("pissa") else 1)
    limit = next((size for size in _VLLM_RANKS if size >= rank), rank)
    revision = f" --revision {plan.base_revision}" if plan.base_revision else ""
    quantized = "" if plan.quantization is None else " --quantization bitsandbytes"  # NF4, as in training
    template = " --chat-template chat_template.jinja" if uses_own_template(plan) else ""
    return (
        f"vllm serve {base}{revision}{quantized} --enable-lora --max-lora-rank {limit} --lora-modules {name}=."
        f"{template}{trusted}"
    )


def describe_window(window: int) -> str:
    """Describe the length limit of a GGUF file whose sliding window llama.cpp does not apply."""
    return (
        f"llama.cpp has no sliding window for this family: answers are right up to {window:,} tokens of prompt and "
        f"answer (-c {window}). Serve longer ones with transformers or vLLM"
    )


def render_modelfile(
    plan: Plan,
    manifest: Manifest,
    tokenizer: BaseTokenizer,
    file: str,
    ends: Sequence[int],
    window: int | None = None,
) -> str:
    """Return Ollama's Modelfile: the file, the template of the training in Go, stop tokens, sampling and context."""
    texts = (
        ("TEMPLATE", render_go_template(plan, tokenizer)),
        ("SYSTEM", plan.data.system_prompt),
        ("LICENSE", manifest.license),
    )
    stops = map(tokenizer.backend.id_to_token, ends)
    decoding = manifest.training.decoding or Decoding()
    context = min(plan.base.max_positions, max(_MIN_CONTEXT, plan.batch.sequence_length), window or _UNLIMITED)
    lines = [
        f"FROM ./{file}",
        *(f'{keyword} """{text}"""' for keyword, text in texts if text and is_quotable(text)),
        *(f'PARAMETER stop "{stop}"' for stop in stops if stop and stop.isprintable() and '"' not in stop),
        f"PARAMETER temperature {decoding.temperature or 0:g}",
        f"PARAMETER num_ctx {context}",
    ]
    return "\n".join(lines) + "\n"


def is_quotable(text: str) -> bool:
    """Return whether a Modelfile can contain a text. Texts with three quotation marks cannot be escaped there."""
    return '"""' not in text and not text.endswith('"') and "\0" not in text


def render_go_template(plan: Plan, tokenizer: BaseTokenizer) -> str | None:
    """Return the training's prompt as an Ollama template; None if the text around question and answer varies."""
    template = make_planned_template(plan.data, tokenizer)
    unescape = template.controls.unescape
    turns = (Message("user", _PROMPT), Message("assistant", _ANSWER))
    try:
        plain = _cut_bos(unescape(render_prompt(template, _PROMPT)), tokenizer)
        conversation = unescape("".join(segment.text for segment in template.render(Conversation(turns))))
    except InputError:
        return None
    try:
        system = _cut_bos(unescape(render_prompt(template, _PROMPT, system=_SYSTEM)), tokenizer)
    except InputError:
        system = ""
    if plain.count(_PROMPT) != 1 or conversation.count(_ANSWER) != 1:
        return None
    before, _, after = plain.partition(_PROMPT)
    start = _escape(before)
    if system.count(_SYSTEM) == 1 and system.endswith(f"{_PROMPT}{after}"):
        head, _, rest = system.removesuffix(f"{_PROMPT}{after}").partition(_SYSTEM)
        start = f"{{{{ if .System }}}}{_escape(head)}{{{{ .System }}}}{_escape(rest)}{{{{ else }}}}{start}{{{{ end }}}}"
    end = conversation.partition(_ANSWER)[2]
    return f"{start}{{{{ .Prompt }}}}{_escape(after)}{{{{ .Response }}}}{_escape(end)}"


def _cut_bos(text: str, tokenizer: BaseTokenizer) -> str:
    """Remove a BOS token that llama.cpp adds by itself."""
    bos = tokenizer.special_token("bos_token") if tokenizer.bos_ids else None
    return text.removeprefix(bos) if bos else text


def _escape(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')
