"""llama.cpp in a process of its own, because it may abort: greedy generation from a GGUF file, and quantization."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from launcher.training.runtime.parent_watch import exit_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run `generate FILE` (request on stdin, answers on stdout as JSON) or `quantize SOURCE FILE TYPE`."""
    verb, *rest = sys.argv[1:] if argv is None else argv
    exit_with_parent()
    stdout = os.dup(1)
    os.dup2(2, 1)  # llama.cpp prints on stdout
    if verb == "quantize":
        return quantize(*rest)
    answers = generate(*rest, **json.load(sys.stdin))
    with os.fdopen(stdout, "w", encoding="utf-8") as file:
        json.dump(answers, file)
    return 0


def quantize(source: str, file: str, file_type: str) -> int:
    """Quantize a GGUF file; returns llama.cpp's exit code."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = int(file_type)
    code: int = llama_cpp.llama_model_quantize(source.encode(), file.encode(), parameters)
    return code


def generate(
    file: str, *, prompts: Sequence[Any], ends: Sequence[int], max_new_tokens: int, context: int, exact: bool
) -> dict[str, Any]:
    """Tokenize prompts as a server does, and generate greedily until a token that ends a turn.

    `exact` runs on the CPU and keeps the KV cache in FP32.
    """
    import llama_cpp

    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # two logical CPUs per core; threads wait for each other busily
    cache: dict[str, Any] = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32} if exact else {}
    model: Any = llama_cpp.Llama(
        model_path=file,
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=0 if exact else -1,
        verbose=False,
        **cache,
    )
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    answers = []
    for text, adds_bos in prompts:
        ids = model.tokenize(text.encode(), add_bos=adds_bos, special=True)
        made: list[int] = []
        if 0 < len(ids) < context:
            model.reset()
            for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
                made.append(int(token))
                is_end = llama_cpp.llama_vocab_is_eog(vocabulary, token)
                if is_end or len(made) == min(max_new_tokens, context - len(ids)):
                    break
        answers.append({"prompt": list(map(int, ids)), "answer": made})
    return {"answers": answers, "ends": [bool(llama_cpp.llama_vocab_is_eog(vocabulary, end)) for end in ends]}


if __name__ == "__main__":
    sys.exit(main())
