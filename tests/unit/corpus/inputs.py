"""Helpers of the corpus tests: a small tokenizer, base model, rows and manifest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from launcher.corpus.prepare import Prepared, prepare
from launcher.corpus.spec import PreparationSpec, make_preparation_spec
from launcher.corpus.store import Store
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.request.request import Request, plan_request
from tests.conftest import ROOT, python_path
from tests.forked_python import run_python

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "head_dim": 32,
}
_TEXTS = (
    "MATCH (p:Person)-[:MADE]->(f:Film) WHERE p.name = 'Ada' RETURN count(f)",
    "How many films did this person make? Which of them has the highest budget?",
    "SELECT name, count(*) FROM films GROUP BY name ORDER BY 2 DESC LIMIT 10",
    '{"title": "A film", "year": 1999, "actors": ["Ada", "Grace"]}',
)


def write_base(
    folder: Path, *, template: str | None = CHAT_TEMPLATE, settings: Mapping[str, Any] | None = None
) -> Path:
    """A byte-level tokenizer of a few hundred tokens, and a config.json: enough for `--base FOLDER`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    chat = {"chat_template": template} if template is not None else {}
    whole = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **chat, **(settings or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "question": f"How many films did person {number} make?",
            "schema": "(:Person {name})-[:MADE]->(:Film {title})",
            "cypher": f"MATCH (p:Person {{id: {number}}})-[:MADE]->(f) RETURN count(f)" + " LIMIT 1" * (number % 7),
        }
        for number in range(first, first + count)
    ]


def write_jsonl(file: Path, rows: Iterable[object]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_expert(folder: Path, dataset: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """Write the neo4j manifest with `train.jsonl` next to it: 128 tokens per sequence, no evaluation by default."""
    tree = json.loads((ROOT / "experts/neo4j/manifest.json").read_text())
    tree["training"]["dataset"] = {
        "path": "train.jsonl",
        "format": "jsonl",
        "field_mapping": {"instruction": "question", "input": "schema", "response": "cypher"},
        **(dataset or {}),
    }
    tree["training"]["config"] |= {
        "max_seq_length": 128,
        "evaluation_strategy": "no",
        "load_best_model_at_end": False,
        **config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "manifest.json"
    file.write_text(json.dumps(tree))
    return file


def make_spec(manifest: Path, base: Path, overrides: Sequence[str] = ()) -> PreparationSpec:
    planned = plan_request(Request(expert=str(manifest), base=str(base), gpu="rtx4090", overrides=overrides))
    return make_preparation_spec(planned.plan, planned.loaded.folder, BaseTokenizer(folder=base))


def prepare_quietly(spec: PreparationSpec) -> Prepared:
    return prepare(spec, lambda _: None, lambda _: None)


def documents_of(store: Store, split: str = "train") -> dict[int, tuple[list[int], list[int]]]:
    """Row -> its ids and its mask, out of the packs."""
    documents = {}
    for pack in store.open_split(split):
        ends = pack.document_lengths.cumsum()
        for row, end, length in zip(pack.rows.tolist(), ends.tolist(), pack.document_lengths.tolist(), strict=True):
            documents[row] = (pack.input_ids[end - length : end].tolist(), pack.trained[end - length : end].tolist())
    return documents


def read_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launcher", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "NO_COLOR": "1", "COLUMNS": "140", "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", **more}


def launcher(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", "launcher", *arguments], cwd=cwd, env=environment(**more))
