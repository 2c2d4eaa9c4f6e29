"""The causes of slow training, reproduced and cured in one run on one GPU: a published manifest, as its trainer ran it
and as the launcher runs it.

"before" is the loop that trainings at 8 % GPU utilisation had: rows tokenised one by one in the main process, pairs of
them padded to the longer one, gradient checkpointing, all logits, the loss read back every micro-step. Then the
launcher: on the very same manifest; on the same with its execution keys (checkpointing, optimizer, workers) left to the
plan; and with LoRA in place of DoRA. Qwen3-0.6B with random weights, the neo4j expert's sample, the tiny tokenizer.

    python benchmarks/before_after.py --manifest PUBLISHED.json --out before_after.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from launcher import metrics
from launcher.bases import find_base
from launcher.corpus.preparation import make_preparation
from launcher.corpus.prepare import prepare
from launcher.corpus.tokenizer import load_tokenizer
from launcher.inputs import Request, base_folders, plan_request
from launcher.metrics import load_metrics
from launcher.paths import RunPaths
from launcher.training.assembly import assemble
from launcher.training.chronicle import find_versions
from launcher.training.loop import train
from launcher.training.measures import Measures, MemoryUse, Throughput
from launcher.training.observers.facts import Facts
from launcher.training.starting import start

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "experts" / "neo4j" / "sample" / "train.jsonl"
BASE = "Qwen/Qwen3-0.6B"
EXECUTION_KEYS = (
    "gradient_checkpointing",
    "optim",
    "dataloader_num_workers",
    "torch_compile",
    "torch_compile_mode",
    "fp16",
)
WARM = 3


@dataclass
class Measured:
    name: str
    tokens_per_second: float
    gpu_utilization: float | None
    peak_gib: float
    what: str
    step_seconds: list[float] = field(default_factory=list)


class Utilization:
    """What nvidia-smi shows, sampled beside the loop."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    @contextmanager
    def sampled(self) -> Iterator[None]:
        if shutil.which("nvidia-smi") is None:
            yield
            return
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=200"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            thread = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
            thread.start()
            try:
                yield
            finally:
                process.kill()
                thread.join()

    def _read(self, lines: Any) -> None:
        for line in lines:
            if line.strip().isdigit():
                self.samples.append(float(line))

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.samples) if self.samples else None


def measure_before(config: dict[str, Any], rows: list[dict[str, str]], device: str, steps: int) -> Measured:
    model = build_before(config, device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(config["optim"], parameters, device)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(ROOT / "launcher/tiny/tokenizer.json"), pad_token="<pad>")
    utilization, seconds, tokens = Utilization(), [], []
    pairs = iter(range(0, len(rows), config["batch_size"]))
    accumulation = config["gradient_accumulation_steps"]
    for step in range(1 + steps):  # it compiles nothing: one step warms it up
        began, seen = time.perf_counter(), 0
        with utilization.sampled() if step else _nothing():
            for _ in range(accumulation):
                at = next(pairs)
                batch = tokenise_pair(rows[at : at + config["batch_size"]], tokenizer, config["max_seq_length"], device)
                seen += int(batch["attention_mask"].sum())
                with torch.autocast(device, dtype=torch.bfloat16):
                    loss = model(**batch).loss / accumulation
                loss.backward()
                loss.item()
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        tokens.append(seen)
    rates = [count / taken for count, taken in zip(tokens[1:], seconds[1:], strict=True)]
    what = f"pairs padded to the longer one, {config['adapter_type']}, checkpointing, {config['optim']}, all logits"
    return Measured("before", statistics.median(rates), utilization.mean, peak_gib(), what, seconds[1:])


def build_before(config: dict[str, Any], device: str) -> Any:
    known = find_base(BASE)
    assert known is not None
    torch.manual_seed(0)
    config_of_base: Any = AutoConfig.for_model(**dict(known))  # type: ignore[arg-type]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of_base, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    adapter = LoraConfig(
        r=config["rank"],
        lora_alpha=config["alpha"],
        lora_dropout=config["dropout"],
        target_modules=config["target_modules"],
        use_dora=config["adapter_type"] == "dora",
    )
    adapted = get_peft_model(model, adapter)
    adapted.train()
    return adapted


def make_optimizer(name: str, parameters: list[Any], device: str) -> Any:
    if name == "adamw_bnb_8bit" and device == "cuda":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4)


def tokenise_pair(rows: list[dict[str, str]], tokenizer: Any, longest: int, device: str) -> dict[str, Any]:
    texts = [f"{row['question']}\n{row['schema']}\n{row['cypher']}" for row in rows]
    made = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    labels = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
    return {
        "input_ids": made["input_ids"].to(device),
        "attention_mask": made["attention_mask"].to(device),
        "labels": labels.to(device),
    }


def measure_launcher(name: str, manifest: dict[str, Any], what: str, steps: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        path = folder / "manifest.json"
        path.write_text(json.dumps(manifest))
        plan = plan_request(Request(expert=str(path), random_weights=True, profile="full", max_steps=WARM + steps)).plan
        tokenizer = load_tokenizer(plan.base.name, base_folders(folder), any_will_do=True)
        store = prepare(make_preparation(plan, folder, tokenizer), lambda _text: None, lambda _rows: None).store
        run, _ = assemble(plan, RunPaths(folder), store, (), start(plan))
        utilization = Utilization()
        reset_peak()
        with utilization.sampled():
            train(run, Facts(), measure=Measures([Throughput(run), MemoryUse(run)]))
        rows = load_metrics(run.paths.metrics)[WARM:]
        split = f"{plan.batch.micro_batch_size} a micro-step x {plan.batch.gradient_accumulation_steps}"
        compiled = "not compiled" if plan.compile is None else f"compiled by {plan.compile.scope}"
        return Measured(
            name,
            statistics.median(row.values[metrics.TOKENS_PER_SECOND] for row in rows),
            _later_half(utilization.samples),
            peak_gib(),
            f"{what}; {split}, {plan.attention.backend}, {plan.loss_kernel}, {compiled}, "
            f"checkpointing {plan.checkpointing}",
            [row.values[metrics.STEP_SECONDS] for row in rows],
        )


def _later_half(samples: list[float]) -> float | None:
    """Behind compiling, which is not training."""
    busy = samples[-max(1, len(samples) // 4) :]
    return statistics.mean(busy) if busy else None


def make_manifests(published: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """The published one with our rows and base; and what follows when the plan may decide more."""
    dataset = {
        "path": str(SAMPLE),
        "format": "jsonl",
        "field_mapping": {"instruction": "question", "input": "schema", "response": "cypher"},
    }
    same = json.loads(json.dumps(published))
    same["training"]["dataset"] = dataset
    same["base_models"] = [{**published["base_models"][0], "name": BASE}][:1]
    same["training"]["config"] |= {"loss_on": "all", "torch_compile": True}
    for key in ("validation_file", "evaluation_strategy", "save_strategy", "load_best_model_at_end"):
        same["training"]["config"].pop(key, None)
    same["training"]["config"] |= {"evaluation_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    free = json.loads(json.dumps(same))
    for key in EXECUTION_KEYS:
        free["training"]["config"].pop(key, None)
    free["training"]["config"] |= {"torch_compile": True, "optim": "adamw_torch_fused"}
    lora = json.loads(json.dumps(free))
    lora["training"]["config"]["adapter_type"] = "lora"
    for adapter in lora["base_models"][0].get("adapters", []):
        adapter["type"] = "lora"
    return [
        ("launcher, same manifest", same, "every value of the manifest"),
        ("launcher, plan decides", free, "checkpointing, optimizer and workers left to the plan"),
        ("launcher, LoRA", lora, "the same with LoRA"),
    ]


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def isolated(measure: Callable[[], Measured]) -> Measured:
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)
    reset_peak()
    made = measure()
    shown = {"tok/s": round(made.tokens_per_second), "util %": made.gpu_utilization, "GiB": round(made.peak_gib, 1)}
    print(made.name, shown, file=sys.stderr, flush=True)
    return made


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, required=True, help="a published manifest with DoRA or LoRA")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each; `before` gets a third")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    published = json.loads(args.manifest.read_text())
    config = published["training"]["config"]
    rows = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = [isolated(lambda: measure_before(config, rows, device, max(2, args.steps // 3)))]
    for name, manifest, what in make_manifests(published):
        results.append(isolated(partial(measure_launcher, name, manifest, what, args.steps)))
    report = {
        "manifest": args.manifest.name,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": find_versions(),
        "results": [asdict(result) for result in results],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("| | tokens/s | against before | GPU utilisation | peak GiB |\n|---|---|---|---|---|")
    for result in results:
        ratio = result.tokens_per_second / results[0].tokens_per_second
        busy = "" if result.gpu_utilization is None else f"{result.gpu_utilization:.0f} %"
        print(f"| {result.name} | {result.tokens_per_second:,.0f} | {ratio:.1f}x | {busy} | {result.peak_gib:.1f} |")


if __name__ == "__main__":
    main()
