"""Train with TRL or Unsloth what we train by a plan: the same tokens, loss mask and settings.

    launcher plan EXPERT --json > plan.json
    python -m benchmarks.peers.peer_training trl plan.json STORE OUT

quality.py and peer_speed.py run it. The last line of the output is JSON: seconds of training, and the peak of torch's
allocated memory; with --packed also the median speed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from launcher.core.units import bytes_to_gib
from launcher.plan import Plan, load_plan

# Tokens per micro-step, with padding. TRL computes the logits of all tokens; Unsloth does not.
WARMUP_STEPS = 4  # of --packed, as in training.py: the first ones compile
MAX_TOKENS = {"trl": 16384, "unsloth": 32768}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=tuple(MAX_TOKENS))
    parser.add_argument("plan", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, help="tokens per micro-step, with padding")
    parser.add_argument("--packed", action="store_true", help="pack documents and train all tokens, to measure speed")
    args = parser.parse_args()
    importlib.import_module(args.tool)  # Unsloth must be imported before TRL and transformers
    print(json.dumps(train(args)))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train the tokens of a store with the settings of a plan; return seconds and peak memory of the training."""
    import torch  # slow imports, not needed for --help
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from benchmarks.peers.quality import iterate_documents, open_store

    plan = load_plan(args.plan)
    documents = list(iterate_documents(open_store(args.store), "train"))
    steps_per_epoch = math.ceil(len(open_store(args.store).open_split("train")) / plan.batch.global_batch_size)
    settings = make_settings(
        plan,
        num_steps=plan.schedule.max_steps or round(steps_per_epoch * plan.schedule.epochs),
        rows_per_step=len(documents) / steps_per_epoch,
        longest=max(len(document["input_ids"]) for document in documents),
        max_tokens=args.tokens or MAX_TOKENS[args.tool],
    )
    if args.tool == "trl" and torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None:
        settings["use_liger_kernel"] = True  # faster, and less memory
    if args.packed:
        settings |= make_packed_settings(plan)
        documents = [{"input_ids": document["input_ids"]} for document in documents]
    if args.tool == "unsloth" and args.packed:
        check_unsloth_packing()
    model = load_with_unsloth(plan) if args.tool == "unsloth" else load_with_peft(plan, packed=args.packed)
    times = StepTimes()
    trainer = SFTTrainer(
        **model,
        args=SFTConfig(**settings, output_dir=str(args.out), report_to=[]),
        train_dataset=Dataset.from_list(documents),
        callbacks=[make_callback(times)] if args.packed else [],
    )
    result = trainer.train()
    trainer.save_model(str(args.out))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    row = {"train_seconds": result.metrics["train_runtime"], "peak_gib": round(bytes_to_gib(peak), 2)}
    if args.packed:
        lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
        steps = times.seconds[WARMUP_STEPS:]
        tokens = plan.batch.global_batch_size * statistics.mean(lengths)
        row |= {"tokens_per_second": round(tokens / statistics.median(steps)), "step_seconds": steps}
    return row


class StepTimes:
    """Seconds of the optimizer steps, until the GPU has finished them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(round(time.perf_counter() - self._began, 4))


def make_callback(times: StepTimes) -> Any:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.end()

    return Callback()


def make_packed_settings(plan: Plan) -> dict[str, Any]:
    """Return settings for packed sequences, one micro-batch per step, and the loss on all tokens."""
    return {
        "per_device_train_batch_size": plan.batch.global_batch_size,
        "gradient_accumulation_steps": 1,
        "max_steps": plan.schedule.max_steps,
        "completion_only_loss": False,
        "packing": True,
    }


def load_with_peft(plan: Plan, *, packed: bool) -> dict[str, Any]:
    """Return TRL's arguments for a base in the dtype of the plan, with an adapter by PEFT.

    FlexAttention separates packed documents without a further package.
    """
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.bfloat16 if plan.precision.compute_dtype == "bf16" else torch.float32
    attention = "flex_attention" if packed and torch.cuda.is_available() else None
    base = AutoModelForCausalLM.from_pretrained(plan.base.name, dtype=dtype, attn_implementation=attention)
    adapter = LoraConfig(**make_lora_settings(plan), task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(plan.base.name)
    return {"model": base, "peft_config": adapter, "processing_class": tokenizer}


def load_with_unsloth(plan: Plan) -> dict[str, Any]:
    """Return the arguments of Unsloth's trainer: its model and tokenizer, without gradient checkpointing."""
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        plan.base.name, max_seq_length=plan.batch.sequence_length, load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(
        model,
        **make_lora_settings(plan),
        use_gradient_checkpointing=False,
        random_state=plan.schedule.seed,
        max_seq_length=plan.batch.sequence_length,
    )
    return {"model": model, "processing_class": tokenizer}


def check_unsloth_packing() -> None:
    """Raise an error if Unsloth would compute the attention of each packed document by itself, which is slow."""
    import torch
    from unsloth.utils import attention_dispatch

    has_torch_varlen = getattr(attention_dispatch, "_TORCH_VARLEN_ATTN", None) is not None
    if attention_dispatch.select_attention_backend(use_varlen=True) == "sdpa" and not has_torch_varlen:
        raise RuntimeError(
            f"Unsloth finds neither flash-attn nor xformers for torch {torch.__version__} (CUDA {torch.version.cuda}), "
            "and needs one of them, or torch 2.12, to pack documents"
        )


def make_lora_settings(plan: Plan) -> dict[str, Any]:
    return {
        "r": plan.adapter.rank or 16,
        "lora_alpha": plan.adapter.alpha or 32,
        "lora_dropout": plan.adapter.dropout,
        "target_modules": list(plan.adapter.target_modules),
    }


def make_settings(plan: Plan, *, num_steps: int, rows_per_step: float, longest: int, max_tokens: int) -> dict[str, Any]:
    """Translate a plan: the same optimizer, schedule and rows; nearly as many rows per step, and steps."""
    from launcher.training.engine.optimizer import count_warmup_steps  # imports transformers

    accumulation = math.ceil(rows_per_step * longest / max_tokens)
    micro = max(1, round(rows_per_step / accumulation))
    accumulation = max(1, round(rows_per_step / micro))
    num_steps = max(1, round(num_steps * rows_per_step / (micro * accumulation)))
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "max_steps": num_steps,
        "learning_rate": plan.optimizer.learning_rate,
        "lr_scheduler_type": plan.schedule.lr_scheduler,
        "warmup_steps": count_warmup_steps(plan.schedule, num_steps),
        "weight_decay": plan.optimizer.weight_decay,
        "adam_beta1": plan.optimizer.betas[0],
        "adam_beta2": plan.optimizer.betas[1],
        "adam_epsilon": plan.optimizer.epsilon,
        "max_grad_norm": plan.optimizer.max_grad_norm or 0.0,
        "bf16": plan.precision.compute_dtype == "bf16",
        "gradient_checkpointing": False,
        "max_length": plan.batch.sequence_length,
        "completion_only_loss": True,
        "packing": False,
        "seed": plan.schedule.seed,
        "logging_steps": 10,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


if __name__ == "__main__":
    main()
