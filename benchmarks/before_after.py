"""Speed of a published manifest in its original training loop and in the launcher, on one GPU.

"before" is the original loop, with 8 % GPU utilization: rows tokenized one by one in the main process, padded pairs,
gradient checkpointing, full logits, a host sync per micro-step. Then the launcher: with the same manifest; with its
execution keys (checkpointing, optimizer, workers) left to the plan; and with LoRA instead of DoRA. Without --base:
Qwen3-0.6B with random weights and the tiny tokenizer; without --rows: the neo4j expert's sample.

    python benchmarks/before_after.py --manifest PUBLISHED.json --out before_after.json
    python benchmarks/before_after.py --manifest PUBLISHED.json --base FOLDER --rows ROWS.jsonl --out before_after.json
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
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from launcher.base_models.catalogue import lookup_base
from launcher.core import metrics
from launcher.core.metrics import load_metrics
from launcher.core.run_paths import RunPaths
from launcher.corpus.prepare import prepare
from launcher.corpus.spec import make_preparation_spec
from launcher.corpus.tokenizer import load_tokenizer
from launcher.request.request import Request, base_folders, plan_request
from launcher.training.build import build_run
from launcher.training.engine.accelerator import build_accelerator
from launcher.training.loop import train
from launcher.training.monitoring.meters import MemoryMeter, Meters, ThroughputMeter
from launcher.training.observers.metrics_writer import MetricsWriter
from launcher.training.runtime.run_record import collect_versions

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "experts" / "neo4j" / "sample" / "train.jsonl"
RANDOM_BASE = "Qwen/Qwen3-0.6B"
EXECUTION_KEYS = (
    "gradient_checkpointing",
    "optim",
    "dataloader_num_workers",
    "torch_compile",
    "torch_compile_mode",
    "fp16",
)
WARMUP_STEPS = 3


@dataclass
class Measurement:
    name: str
    tokens_per_second: float
    gpu_utilization: float | None
    peak_gib: float
    what: str
    step_seconds: list[float] = field(default_factory=list)


class Utilization:
    """GPU utilization reported by nvidia-smi, sampled in the background."""

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


def measure_before(config: dict[str, Any], base: Path | None, rows: Path, device: str, steps: int) -> Measurement:
    model = build_before(config, base, device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(config["optim"], parameters, device)
    tokenizer = load_tokenizer_before(base)
    lines = rows.read_text(encoding="utf-8").splitlines()
    utilization, seconds, tokens = Utilization(), [], []
    pairs = iter(range(0, len(lines), config["batch_size"]))
    accumulation = config["gradient_accumulation_steps"]
    for step in range(1 + steps):  # nothing is compiled: one warm-up step is enough
        began, num_tokens = time.perf_counter(), 0
        with utilization.sampled() if step else nullcontext():
            for _ in range(accumulation):
                row = next(pairs)
                pair = [json.loads(line) for line in lines[row : row + config["batch_size"]]]
                batch = tokenize_pair(pair, tokenizer, config["max_seq_length"], device)
                num_tokens += int(batch["attention_mask"].sum())
                with torch.autocast(device, dtype=torch.bfloat16):
                    loss = model(**batch).loss / accumulation
                loss.backward()
                loss.item()
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        tokens.append(num_tokens)
    rates = [count / taken for count, taken in zip(tokens[1:], seconds[1:], strict=True)]
    what = f"padded pairs, {config['adapter_type']}, checkpointing, {config['optim']}, full logits"
    return Measurement("before", statistics.median(rates), utilization.mean, peak_gib(), what, seconds[1:])


def load_tokenizer_before(base: Path | None) -> Any:
    if base is not None:
        return AutoTokenizer.from_pretrained(base)
    tiny = ROOT / "launcher/base_models/tiny_base/tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(tiny), pad_token="<pad>")


def build_before(config: dict[str, Any], base: Path | None, device: str) -> Any:
    torch.manual_seed(0)
    model: Any
    with torch.device(device):
        if base is not None:
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        else:
            known = lookup_base(RANDOM_BASE)
            assert known is not None
            random_config: Any = AutoConfig.for_model(**dict(known))  # type: ignore[arg-type]
            model = AutoModelForCausalLM.from_config(random_config, dtype=torch.bfloat16)
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


def tokenize_pair(rows: list[dict[str, str]], tokenizer: Any, longest: int, device: str) -> dict[str, Any]:
    texts = [f"{row['question']}\n{row['schema']}\n{row['cypher']}" for row in rows]
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
    return {
        "input_ids": encoded["input_ids"].to(device),
        "attention_mask": encoded["attention_mask"].to(device),
        "labels": labels.to(device),
    }


def measure_launcher(name: str, manifest: dict[str, Any], what: str, base: Path | None, steps: int) -> Measurement:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        path = folder / "manifest.json"
        path.write_text(json.dumps(manifest))
        plan = plan_request(
            Request(expert=str(path), random_weights=base is None, profile="full", max_steps=WARMUP_STEPS + steps)
        ).plan
        tokenizer = load_tokenizer(plan.base.name, base_folders(folder), allow_tiny_fallback=base is None)
        store = prepare(make_preparation_spec(plan, folder, tokenizer), lambda _text: None, lambda _rows: None).store
        run, _ = build_run(plan, RunPaths(folder), store, (), build_accelerator(plan))
        utilization = Utilization()
        reset_peak()
        with utilization.sampled():
            train(run, MetricsWriter(), meter=Meters([ThroughputMeter(run), MemoryMeter(run)]))
        rows = load_metrics(run.paths.metrics)[WARMUP_STEPS:]
        split = f"{plan.batch.micro_batch_size} per micro-step x {plan.batch.gradient_accumulation_steps}"
        compiled = "not compiled" if plan.compile is None else f"compiled by {plan.compile.scope}"
        return Measurement(
            name,
            statistics.median(row.values[metrics.TOKENS_PER_SECOND] for row in rows),
            _mean_of_last_quarter(utilization.samples),
            peak_gib(),
            f"{what}; {split}, {plan.attention.backend}, {plan.loss_kernel}, {compiled}, "
            f"checkpointing {plan.checkpointing}",
            [row.values[metrics.STEP_SECONDS] for row in rows],
        )


def _mean_of_last_quarter(samples: list[float]) -> float | None:
    """Return the mean of the last quarter, after compilation."""
    busy = samples[-max(1, len(samples) // 4) :]
    return statistics.mean(busy) if busy else None


def make_manifests(published: dict[str, Any], base: Path | None, rows: Path) -> list[tuple[str, dict[str, Any], str]]:
    """Return the published manifest with our rows and base, and variants with more left to the plan."""
    dataset = {
        "path": str(rows),
        "format": "jsonl",
        "field_mapping": {"instruction": "question", "input": "schema", "response": "cypher"},
    }
    same = json.loads(json.dumps(published))
    same["training"]["dataset"] = dataset
    same["base_models"] = [{**published["base_models"][0], "name": RANDOM_BASE if base is None else str(base)}][:1]
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


def run_isolated(measure: Callable[[], Measurement]) -> Measurement:
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)
    reset_peak()
    measurement = measure()
    shown = {
        "tok/s": round(measurement.tokens_per_second),
        "util %": measurement.gpu_utilization,
        "GiB": round(measurement.peak_gib, 1),
    }
    print(measurement.name, shown, file=sys.stderr, flush=True)
    return measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, required=True, help="a published manifest with DoRA or LoRA")
    parser.add_argument(
        "--steps", type=int, default=8, help="timed steps per measurement; a third of them for `before`"
    )
    parser.add_argument("--base", type=Path, help="folder of a pretrained base")
    parser.add_argument("--rows", type=Path, default=SAMPLE, help="JSON lines with question, schema and cypher")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    base, rows = args.base and args.base.resolve(), args.rows.resolve()
    published = json.loads(args.manifest.read_text())
    config = published["training"]["config"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = [run_isolated(lambda: measure_before(config, base, rows, device, max(2, args.steps // 3)))]
    for name, manifest, what in make_manifests(published, base, rows):
        results.append(run_isolated(partial(measure_launcher, name, manifest, what, base, args.steps)))
    report = {
        "manifest": args.manifest.name,
        "base": RANDOM_BASE if base is None else base.name,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": collect_versions(),
        "results": [asdict(result) for result in results],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("| | tokens/s | relative to before | GPU utilization | peak GiB |\n|---|---|---|---|---|")
    for result in results:
        ratio = result.tokens_per_second / results[0].tokens_per_second
        busy = "" if result.gpu_utilization is None else f"{result.gpu_utilization:.0f} %"
        print(f"| {result.name} | {result.tokens_per_second:,.0f} | {ratio:.1f}x | {busy} | {result.peak_gib:.1f} |")


if __name__ == "__main__":
    main()
