"""Small random models of some families, with tokenizers of their kind, as GGUF files in llama.cpp.

`python -m tests.training.export.gguf_families` prints the table of docs/SERVING.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.corpus.documents import make_template
from launcher.corpus.end_token import collect_end_ids
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.training.export.gguf import write_files
from launcher.training.export.gguf_check import Questions, check_answers, generate_answers
from launcher.training.inference.prompt import render_prompt
from tests.unit.corpus.families import FAMILIES, write_family

# family of transformers -> kind of its tokenizer
TOKENIZERS = {"gemma2": "gemma", "llama": "llama 3", "qwen3": "qwen 2.5"}
QUANTIZATIONS = ("f16", "q8_0", "q4_k_m")
NUM_PROMPTS, NUM_TOKENS = 20, 24
_WORDS = ("how", "many", "films", "did", "this", "person", "make", "which", "has", "the", "highest", "budget", "model")


def measure(folder: Path, model_type: str, quantizations: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return by quantization the prompts with the same tokens, and those with the same greedy answers."""
    merged = folder / "merged"
    kind = FAMILIES[TOKENIZERS[model_type]]
    tokenizer = write_family(merged, kind)
    model = _write_model(merged, model_type, tokenizer)
    template = make_template("tokenizer", tokenizer)
    encoder = TextEncoder(tokenizer, template)
    ends = collect_end_ids(tokenizer, template.end_token)
    files = write_files(folder, merged, quantizations, expert=model_type, ends=ends, llama_cpp=None, report=print)
    texts = [" ".join(_WORDS[n % 7 :: 1 + n % 3]) + f" {n}?" for n in range(NUM_PROMPTS)]
    prompts = [render_prompt(template, text) for text in texts]
    questions = Questions(
        prompts=prompts,
        ids=[encoder.encode_prompt(prompt) for prompt in prompts],
        requests=[(template.controls.unescape(prompt), encoder.adds_bos(prompt)) for prompt in prompts],
        rows=None,
    )
    expected = [_answer(model, ids, ends) for ids in questions.ids]
    results = {}
    for name, file in files.items():
        answers = generate_answers(file, questions, ends, NUM_TOKENS)
        assert all(answers["ends"]), name
        rows = answers["answers"]
        other = [index for index, row in enumerate(rows) if row["answer"] != expected[index]]
        if name == "f16":
            check_answers(name, model, torch.device("cpu"), questions, rows, other)
        same_tokens = sum(row["prompt"] == questions.ids[index] for index, row in enumerate(rows))
        results[name] = (same_tokens, NUM_PROMPTS - len(other))
    return results


def _write_model(folder: Path, model_type: str, tokenizer: BaseTokenizer) -> Any:
    eos = tokenizer.backend.token_to_id(tokenizer.end_of_text or "")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
    if model_type == "gemma2":
        more["sliding_window"] = 16
    config = AutoConfig.for_model(
        model_type, **sizes, **more, vocab_size=tokenizer.backend.get_vocab_size(), initializer_range=0.1,
        pad_token_id=0, bos_token_id=1, eos_token_id=eos, use_sliding_window=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # with norms of one, a wrong norm would not show
            parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.data = parameter.data.half().float()
    model.save_pretrained(str(folder))
    return model


def _answer(model: Any, ids: list[int], ends: list[int]) -> list[int]:
    model.generation_config.eos_token_id = ends
    made = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=ends[0])
    answer: list[int] = made[0, len(ids) :].tolist()
    return answer


def main() -> None:
    """Print the table."""
    print(f"| family | tokenizer like | {' | '.join(name.upper() for name in QUANTIZATIONS)} |")
    print(f"|---|---|{'---|' * len(QUANTIZATIONS)}")
    for model_type in sys.argv[1:] or TOKENIZERS:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(Path(folder), model_type, QUANTIZATIONS)
        cells = (f"{tokens}, {answers}" for tokens, answers in results.values())
        print(f"| `{model_type}` | {TOKENIZERS[model_type]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
