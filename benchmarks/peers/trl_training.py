"""Train with TRL what a run of ours has trained: the same tokens, loss mask, settings and number of steps.

    python -m benchmarks.peers.trl_training RUN STORE OUT

quality.py runs it. The last line of the output is the peak of torch's allocated memory in GiB.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from benchmarks.peers.quality import iterate_documents, open_store
from launcher.core.run_paths import RunPaths
from launcher.core.units import bytes_to_gib
from launcher.plan import Plan, load_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per micro-step, with padding")
    print(train(parser.parse_args()))


def train(args: argparse.Namespace) -> float:
    """Train the tokens of a store with the settings of a run's plan; return the peak of allocated memory in GiB."""
    import torch  # slow imports, not needed for --help
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    plan = load_plan(RunPaths(args.run).plan)
    documents = list(iterate_documents(open_store(args.store), "train"))
    steps_per_epoch = math.ceil(len(open_store(args.store).open_split("train")) / plan.batch.global_batch_size)
    settings = make_trl_settings(
        plan,
        num_steps=plan.schedule.max_steps or round(steps_per_epoch * plan.schedule.epochs),
        rows_per_step=len(documents) / steps_per_epoch,
        longest=max(len(document["input_ids"]) for document in documents),
        max_tokens=args.tokens,
    )
    trainer = SFTTrainer(
        model=plan.base.name,
        args=SFTConfig(**settings, output_dir=str(args.out), report_to=[]),
        train_dataset=Dataset.from_list(documents),
        processing_class=AutoTokenizer.from_pretrained(plan.base.name),
        peft_config=LoraConfig(
            r=plan.adapter.rank or 16,
            lora_alpha=plan.adapter.alpha or 32,
            lora_dropout=plan.adapter.dropout,
            target_modules=list(plan.adapter.target_modules),
            task_type="CAUSAL_LM",
        ),
    )
    trainer.train()
    trainer.save_model(str(args.out))
    return bytes_to_gib(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0.0


def make_trl_settings(
    plan: Plan, *, num_steps: int, rows_per_step: float, longest: int, max_tokens: int
) -> dict[str, Any]:
    """Translate a plan: the same optimizer, schedule and number of steps, nearly the same number of rows per step.

    TRL computes the logits of all tokens, so a micro-step has at most `max_tokens`.
    """
    accumulation = math.ceil(rows_per_step * longest / max_tokens)
    micro = max(1, round(rows_per_step / accumulation))
    is_bf16 = plan.precision.compute_dtype == "bf16"
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(1, round(rows_per_step / micro)),
        "max_steps": num_steps,
        "learning_rate": plan.optimizer.learning_rate,
        "lr_scheduler_type": plan.schedule.lr_scheduler,
        "warmup_steps": plan.schedule.warmup_steps or 0,
        "weight_decay": plan.optimizer.weight_decay,
        "adam_beta1": plan.optimizer.betas[0],
        "adam_beta2": plan.optimizer.betas[1],
        "adam_epsilon": plan.optimizer.epsilon,
        "max_grad_norm": plan.optimizer.max_grad_norm or 0.0,
        "bf16": is_bf16,
        "model_init_kwargs": {"dtype": "bfloat16" if is_bf16 else "float32"},
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
