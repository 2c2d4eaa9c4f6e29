"""Train the tokenizer of the tiny base on the train splits: `python -m experts.generator.train_tokenizer`.

It was run once. launcher/base_models/tiny_base is frozen: weights and prepared data belong to exactly these tokens, and
a test checks the file's hash. The tokens depend on the version of `tokenizers`, so the trained file is committed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
TINY_FOLDER = ROOT / "launcher" / "base_models" / "tiny_base"
NUM_TOKENS = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")


def read_texts() -> Iterator[str]:
    """Yield prompts and answers, as they appear between the ChatML markers."""
    for file in sorted(ROOT.glob("experts/*/sample/train.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            *prompt, answer = json.loads(line).values()
            yield "\n\n".join(prompt)
            yield answer


def train_tokenizer() -> Tokenizer:
    # Imported after limiting it to one thread: merges of equal count could otherwise come in another order.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    # Words keep their leading space; each digit is a token, so that numbers are copied digit by digit; runs of spaces
    # and newlines are not split, for indented code.
    words = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [*read_texts(), *(role for role in ROLES for _ in range(1000))]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> int:
    text = train_tokenizer().to_str(pretty=False) + "\n"
    (TINY_FOLDER / "tokenizer.json").write_text(text, encoding="utf-8")
    print(f"launcher/base_models/tiny_base/tokenizer.json: {len(text.encode()):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
