"""Train the tiny base on texts of the four languages: `python -m experts.generator.train_base`, minutes on a GPU.

It was run once: launcher/base_models/tiny_base/model.safetensors is frozen, and a test holds its hash. Texts, their
order, the first weights and every step are drawn from fixed seeds; on the GPU and with the package versions that its
model card names, training again gives the same file.

    python -m experts.generator.train_base                                   # the published model
    python -m experts.generator.train_base --steps 20 --documents 200 --out DIR   # a quick test on any machine
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from experts.generator.base_texts import write_documents
from experts.generator.splits import EXPERTS
from launcher.core.choices import AttentionBackend

if TYPE_CHECKING:
    import torch

TINY_FOLDER = Path(__file__).resolve().parent.parent.parent / "launcher" / "base_models" / "tiny_base"
END_OF_TEXT = 0
SHARDS = 16  # per language
SEED = 20_261_115
STEPS = 6000
DOCUMENTS = 20_500  # per shard; every document is read twice
STEP_TOKENS = 65_536
PEAK_RATE, WARMUP_STEPS, LAST_SHARE, WEIGHT_DECAY, MAX_NORM = 3e-3, 300, 0.05, 0.1, 1.0
SHOW_EVERY = 250

Tokens = npt.NDArray[np.int16]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Concatenated documents, in training order."""

    tokens: Tokens
    starts: Numbers  # start of each document, and the end of the last one


def make_corpus(documents: int) -> Corpus:
    """Return the shuffled documents of all shards, each terminated by the EOS token."""
    jobs = [(expert, shard, documents) for expert in EXPERTS for shard in range(SHARDS)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        shards = list(pool.map(_encode_shard, jobs))
    tokens = np.concatenate([tokens for tokens, _ in shards])
    lengths = np.concatenate([lengths for _, lengths in shards])
    starts = np.concatenate(([0], np.cumsum(lengths)))
    order = np.random.default_rng(SEED).permutation(len(lengths))
    shuffled = np.concatenate([tokens[starts[index] : starts[index + 1]] for index in order])
    return Corpus(shuffled, np.concatenate(([0], np.cumsum(lengths[order]))))


def _encode_shard(job: tuple[str, int, int]) -> tuple[Tokens, Numbers]:
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json"))
    encoded = [one.ids for one in tokenizer.encode_batch(list(write_documents(*job)), add_special_tokens=False)]
    flat = np.fromiter((token for ids in encoded for token in (*ids, END_OF_TEXT)), dtype=np.int16)
    return flat, np.array([len(ids) + 1 for ids in encoded], dtype=np.int64)


def iterate_steps(corpus: Corpus, steps: int) -> Iterator[tuple[int, Numbers]]:
    """Yield the first token of each step and its document boundaries; the first and last document may be cut."""
    available = len(corpus.tokens) // STEP_TOKENS
    for step in range(steps):
        begin = (step % available) * STEP_TOKENS
        first, last = np.searchsorted(corpus.starts, (begin, begin + STEP_TOKENS), side="right")
        inner = corpus.starts[first:last] - begin
        yield begin, np.unique(np.concatenate(([0], inner, [STEP_TOKENS])))


def compute_learning_rate(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_RATE * (LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


class Trainer:
    """Training step: documents do not attend to each other, loss on every token, FP32 weights, BF16 matmuls."""

    def __init__(self, corpus: Corpus, steps: int) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from launcher.training.model.attention import BACKENDS, register_backend

        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("high")
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        name: AttentionBackend = "varlen" if self._device.type == "cuda" else "sdpa"
        self._backend = BACKENDS[name]
        torch.manual_seed(SEED)
        config = AutoConfig.from_pretrained(str(TINY_FOLDER))
        self.model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=register_backend(name, self._backend), dtype=torch.float32
        ).to(self._device)
        if self._device.type == "cuda":
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
        self._loss = torch.compile(_compute_loss, dynamic=False) if self._device.type == "cuda" else _compute_loss
        matrices = [weight for weight in self.model.parameters() if weight.ndim > 1]
        vectors = [weight for weight in self.model.parameters() if weight.ndim == 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
        self._tokens = torch.from_numpy(corpus.tokens).to(self._device)
        borders = [borders for _, borders in iterate_steps(corpus, min(steps, len(corpus.tokens) // STEP_TOKENS))]
        self._num_borders = max(map(len, borders))
        self._max_length = int(np.diff(corpus.starts).max())

    def step(self, begin: int, borders: Numbers, rate: float) -> torch.Tensor:
        import torch

        from launcher.training.data.collate import PackedBatch

        batch = self._make_batch(PackedBatch, begin, borders)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            hidden = self.model.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                documents=self._backend.build_metadata(batch),
            ).last_hidden_state
            loss: torch.Tensor = self._loss(hidden[0], self.model.lm_head.weight, batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _make_batch(self, make: Any, begin: int, borders: Numbers) -> Any:
        """Pad cu_seqlens with empty documents to a fixed length, so that one CUDA graph serves all steps."""
        import torch

        filled = np.concatenate((borders, np.full(self._num_borders - len(borders), STEP_TOKENS)))
        lengths = np.diff(borders)
        positions = np.arange(STEP_TOKENS) - np.repeat(borders[:-1], lengths)
        tokens = self._tokens[begin : begin + STEP_TOKENS].long()
        targets = torch.cat([tokens[1:], tokens.new_full((1,), -100)])
        # The last token of a document has no target: the next token belongs to another document.
        targets[torch.from_numpy(borders[1:] - 1).to(self._device)] = -100
        return make(
            input_ids=tokens.unsqueeze(0),
            position_ids=torch.from_numpy(positions).to(self._device).unsqueeze(0),
            cu_seqlens=torch.from_numpy(filled.astype(np.int32)).to(self._device),
            trained_positions=tokens.new_empty(0),
            targets=targets,
            max_length=self._max_length,
            document_lengths=tuple(lengths.tolist()),
        )


def _compute_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return functional.cross_entropy(functional.linear(hidden, weight).float(), targets, ignore_index=-100)


def save(model: Any, folder: Path) -> str:
    """Save the model in BF16, with the tied matrix once, and return the SHA-256 of the file."""
    import torch
    from safetensors.torch import save_file

    weights = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    weights.pop("lm_head.weight")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    save_file({name.replace("_orig_mod.", ""): tensor for name, tensor in weights.items()}, file, {"format": "pt"})
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experts.generator.train_base", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="of each shard")
    parser.add_argument("--out", type=Path, default=TINY_FOLDER)
    arguments = parser.parse_args()
    began = time.monotonic()
    corpus = make_corpus(arguments.documents)
    print(f"{len(corpus.starts) - 1:,} documents, {len(corpus.tokens):,} tokens, {time.monotonic() - began:.0f} s")
    trainer = Trainer(corpus, arguments.steps)
    began = time.monotonic()
    for step, (begin, borders) in enumerate(iterate_steps(corpus, arguments.steps), start=1):
        loss = trainer.step(begin, borders, compute_learning_rate(step - 1, arguments.steps))
        if step % SHOW_EVERY == 0 or step in (1, 20, arguments.steps):
            seconds = time.monotonic() - began
            print(f"step {step}/{arguments.steps}  loss {float(loss):.4f}  {seconds:.0f} s", flush=True)
    print(f"{save(trainer.model, arguments.out)}  {arguments.out / 'model.safetensors'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
