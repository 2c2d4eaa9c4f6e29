"""Small models of many families, with tokenizers of their kind, as GGUF files in llama.cpp.

`python -m tests.training.export.gguf_families` prints the table of docs/SERVING.md: each model memorizes 20 rows of the
expert sql, so that its weights are trained ones, and its answers can be judged.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.documents import make_template
from launcher.corpus.end_token import collect_end_ids
from launcher.corpus.text_encoder import TextEncoder
from launcher.judges.base import ReferenceRow
from launcher.judges.registry import open_judge_by_name
from launcher.training.export.gguf import Conversion, write_files
from launcher.training.export.gguf_check import Questions, check_answers, generate_answers
from launcher.training.inference.prompt import render_prompt
from tests.unit.corpus.families import FAMILIES, write_family

# family of transformers -> kind of its tokenizer
TOKENIZERS = {
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "granite": "smollm",
    "llama": "llama 3",
    "mistral": "mistral v3",
    "olmo2": "smollm",
    "phi3": "phi 3",
    "qwen2": "qwen 2.5",
    "qwen3": "qwen 2.5",
    "smollm3": "llama 3",
}
QUANTIZATIONS = ("f16", "q8_0", "q4_k_m")
NUM_ROWS, NUM_TOKENS, MAX_STEPS, ENOUGH = 20, 160, 200, 0.05
_SAMPLE = Path(__file__).parents[3] / "experts/sql/sample/test.jsonl"
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
# What distinguishes a family: windows that are shorter than the prompts, layers of both kinds, multipliers.
_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 64},
    "gemma3_text": {"sliding_window": 32, "query_pre_attn_scalar": 64, "num_hidden_layers": 6},
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 1 / 64,
        "residual_multiplier": 0.22,
        "logits_scaling": 4.0,
    },
    "mistral": {"sliding_window": None},
    "smollm3": {"num_hidden_layers": 4},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Prompts with the same tokens, with the same answer as transformers gives, and with one that the judge accepts."""

    tokens: int
    answers: int
    near_ties: int
    rounded: int
    judged: int


class SmallModel:
    """A model of a family with random weights, its tokenizer, and the questions of 20 rows."""

    def __init__(
        self, folder: Path, model_type: str, *, std: float = 0.02, num_tokens: int = NUM_TOKENS, **settings: Any
    ) -> None:
        self.model_type, self.folder, self.merged = model_type, folder, folder / "merged"
        self.tokenizer = write_family(self.merged, FAMILIES[TOKENIZERS[model_type]])
        self.template = make_template("tokenizer", self.tokenizer)
        self.encoder = TextEncoder(self.tokenizer, self.template)
        self.ends = collect_end_ids(self.tokenizer, self.template.end_token)
        self.rows = _load_rows()
        self.questions = self._make_questions(num_tokens)
        self.model = self._make_model({**_SIZES, **_SETTINGS.get(model_type, {}), "initializer_range": std, **settings})
        self.save()

    def _make_questions(self, num_tokens: int) -> Questions:
        prompts = [render_prompt(self.template, row.instruction) for row in self.rows]
        unescape = self.template.controls.unescape
        return Questions(
            prompts=prompts,
            ids=[self.encoder.encode_prompt(prompt) for prompt in prompts],
            requests=[(unescape(prompt), self.encoder.adds_bos(prompt)) for prompt in prompts],
            rows=None,
            max_new_tokens=num_tokens,
        )

    def _make_model(self, settings: dict[str, Any]) -> Any:
        tokens = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": self.ends[0]}
        vocab_size = self.tokenizer.backend.get_vocab_size()
        config = AutoConfig.for_model(self.model_type, **tokens, **settings, vocab_size=vocab_size)
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # with norms of one and biases of zero, wrong ones would not show
                parameter.data += 0.1 * torch.randn_like(parameter)
        embeddings = model.get_input_embeddings().weight
        embeddings.data *= 0.02 / config.initializer_range  # larger ones would repeat the last token
        return model

    def save(self) -> None:
        """Write the weights that `answer` and the GGUF files have."""
        self.model.save_pretrained(str(self.merged))

    def memorize(self) -> float:
        """Train on the rows until the loss is small; returns the loss."""
        ids, labels = self._make_batch()
        optimizer, loss = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.0), float("inf")
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
        for _ in range(MAX_STEPS):
            result = self.model(input_ids=ids, labels=labels, use_cache=False)
            result.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
            if (loss := float(result.loss.detach())) < ENOUGH:
                break
        self.save()
        return loss

    def _make_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels; padding at the end changes nothing before it."""
        documents = []
        for row in self.rows:
            turns = Message("user", row.instruction), Message("assistant", row.reference)
            segments = self.template.render(Conversation(turns))
            parts = [np.frombuffer(part, dtype=np.int32).tolist() for part in self.encoder.encode([segments])]
            documents.append(
                [(token, segment.is_trained) for part, segment in zip(parts, segments, strict=True) for token in part]
            )
        length = max(map(len, documents))
        ids, labels = torch.zeros(len(documents), length, dtype=torch.long), torch.full((len(documents), length), -100)
        for index, document in enumerate(documents):
            ids[index, : len(document)] = torch.tensor([token for token, _ in document])
            labels[index, : len(document)] = torch.tensor(
                [token if is_trained else -100 for token, is_trained in document]
            )
        return ids, labels

    def answer(self) -> list[dict[str, list[int]]]:
        """Return the greedy answers of transformers."""
        self.model.generation_config.eos_token_id = self.ends
        answers = []
        options = {"max_new_tokens": self.questions.max_new_tokens, "pad_token_id": self.ends[0]}
        for ids in self.questions.ids:
            made = self.model.generate(torch.tensor([ids]), do_sample=False, **options)
            answers.append({"prompt": ids, "answer": made[0, len(ids) :].tolist()})
        return answers

    def write(self, quantizations: Sequence[str]) -> dict[str, Path]:
        """Write GGUF files."""
        conversion = Conversion(merged=self.merged, expert=self.model_type, ends=self.ends, llama_cpp=None)
        return write_files(conversion, self.folder, quantizations)

    def answer_exactly(self) -> list[Any]:
        """Return the answers of llama.cpp with FP32 weights, keys and values."""
        answers: list[Any] = generate_answers(self.write(("f32",))["f32"], self.questions, self.ends, exact=True)[
            "answers"
        ]
        return answers

    def compare(self, name: str, answers: Sequence[Any], expected: Sequence[Any]) -> Result:
        """Compare answers with those of transformers; raises RunFailedError if those of an F16 file are wrong."""
        ties = rounded = 0
        other = [index for index, answer in enumerate(answers) if answer["answer"] != expected[index]["answer"]]
        if name in ("f32", "f16"):
            ties, rounded = check_answers(
                name, self.model, torch.device("cpu"), self.questions, answers, other, self.answer_exactly
            )
        tokens = sum(answer["prompt"] == ids for answer, ids in zip(answers, self.questions.ids, strict=True))
        texts = [self.tokenizer.backend.decode(answer["answer"]) for answer in answers]
        return Result(
            tokens=tokens,
            answers=len(answers) - len(other),
            near_ties=ties,
            rounded=rounded,
            judged=_count_right(self.rows, texts),
        )


def _load_rows() -> list[ReferenceRow]:
    """Return the rows with the shortest answers."""
    rows = sorted(map(json.loads, _SAMPLE.read_text().splitlines()), key=lambda row: len(row["sql"]))[:NUM_ROWS]
    return [
        ReferenceRow(instruction=row["sql_prompt"], context=row["sql_context"], reference=row["sql"]) for row in rows
    ]


def _count_right(rows: Sequence[ReferenceRow], texts: Sequence[str]) -> int:
    with closing(open_judge_by_name("sql")) as judge:
        return sum(verdict.checks[judge.main_check] is True for verdict in judge.judge(rows, texts))


def measure(folder: Path, model_type: str) -> dict[str, Result]:
    """Return the results of the trained model in transformers (`fp32`) and as GGUF files."""
    model = SmallModel(folder, model_type)
    loss = model.memorize()
    print(f"{model_type}: loss {loss:.3f}", file=sys.stderr, flush=True)
    expected = model.answer()
    results = {"fp32": model.compare("fp32", expected, expected)}
    for name, file in model.write(QUANTIZATIONS).items():
        answers = generate_answers(file, model.questions, model.ends)
        assert all(answers["ends"]), name
        results[name] = model.compare(name, answers["answers"], expected)
    return results


def _format(result: Result) -> str:
    ties = f" ({result.near_ties} near ties)" if result.near_ties else ""
    rounded = f" ({result.rounded} by rounding)" if result.rounded else ""
    return f"{result.tokens}, {result.answers}{ties}{rounded}, {result.judged}"


def main() -> None:
    """Print the table: same tokens, same answers, accepted answers."""
    print(f"| family | tokenizer like | FP32 | {' | '.join(name.upper() for name in QUANTIZATIONS)} |")
    print(f"|---|---|---|{'---|' * len(QUANTIZATIONS)}")
    for model_type in sys.argv[1:] or TOKENIZERS:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(Path(folder), model_type)
        cells = (str(results.pop("fp32").judged), *map(_format, results.values()))
        print(f"| `{model_type}` | {TOKENIZERS[model_type]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
