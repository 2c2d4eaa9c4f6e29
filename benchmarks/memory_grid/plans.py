"""Plans of the memory grid's cases: a manifest of random documents, planned like any other.

Settings that no manifest has are set in the plan afterwards: the split of the batch and the loss kernel. Memory is then
estimated again by the planner's estimator; the speed of a changed split and the OOM fallbacks are dropped.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.memory_grid.cases import ALL_BASES, GridCase, Kind
from launcher.core.choices import AdapterKind, Checkpointing
from launcher.core.errors import DoesNotFitError
from launcher.core.units import format_gib
from launcher.plan.estimator_inputs import estimate_plan_memory
from launcher.plan.model import Plan
from launcher.request.request import PlannedRun, Request, plan_request

MEAN_TOKENS = 350  # per document; affects the time, hardly the memory
_LINEARS = ["gate_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
_ADAPTERS: dict[Kind, AdapterKind] = {"lora": "lora", "dora": "dora", "qlora": "lora", "qdora": "dora", "full": "full"}
_CHECKPOINTING: dict[Checkpointing, bool | str] = {"none": False, "selective": "selective", "full": True}


def plan_case(case: GridCase, folder: Path, num_steps: int, gpu: str | None = None) -> PlannedRun:
    """Write the manifest into the folder and plan it; raises DoesNotFitError. `gpu`: a name of the catalogue."""
    request = Request(
        expert=str(_write_manifest(case, folder, num_steps)),
        profile="full",
        random_weights=True,
        tokens_per_row=MEAN_TOKENS,
        gpu=gpu,
        calibrated=False,  # the estimate itself is under test
    )
    planned = plan_request(request)
    return PlannedRun(request=planned.request, loaded=planned.loaded, plan=_set_sizes(planned.plan, case))


def _set_sizes(plan: Plan, case: GridCase) -> Plan:
    batch = plan.batch.model_copy(
        update={
            "micro_batch_size": case.micro_batch_size,
            "gradient_accumulation_steps": case.accumulation,
            "empty_slots": 0,
        }
    )
    is_changed = batch != plan.batch
    sized = plan.model_copy(
        update={"batch": batch, "loss_kernel": case.loss_kernel or plan.loss_kernel, "oom_fallbacks": ()}
    )
    memory = plan.memory.model_copy(update={"terms": estimate_plan_memory(sized).terms})
    if plan.strategy != "single" or plan.offload != "none" or memory.total_bytes > memory.usable_bytes:
        raise DoesNotFitError(
            f"{case.name} does not fit on one GPU: needs {format_gib(memory.total_bytes)}, "
            f"{format_gib(memory.usable_bytes)} are usable"
        )
    unknown = {"tokens_per_second": None, "seconds_per_step": None, "estimated_tokens_per_second": None}
    speed = plan.speed.model_copy(update=unknown) if is_changed else plan.speed
    return sized.model_copy(update={"memory": memory, "speed": speed})


def _write_manifest(case: GridCase, folder: Path, num_steps: int) -> Path:
    adapter = _ADAPTERS[case.kind]
    config = {
        "method": "sft",
        "adapter_type": adapter,
        **({} if adapter == "full" else {"rank": 16, "alpha": 32, "dropout": case.dropout}),
        **({} if adapter == "full" else {"target_modules": _LINEARS[case.kind == "qdora" :]}),
        "epochs": 1.0,
        "max_steps": num_steps,
        "learning_rate": 1e-4,
        "batch_size": case.micro_batch_size,
        "gradient_accumulation_steps": case.accumulation,
        "max_seq_length": case.sequence_length,
        "packing": True,
        "loss_on": "all",
        "gradient_checkpointing": _CHECKPOINTING[case.checkpointing],
        "torch_compile": case.compiled,
        "torch_compile_mode": "reduce-overhead" if case.graphed else "default",  # with and without CUDA graphs
        **({} if case.compile_backend is None else {"torch_compile_backend": case.compile_backend}),
        "dataloader_num_workers": 0,  # random packs are fast to build, starting workers is not
        "evaluation_strategy": "no",
        "save_strategy": "no",
        "optim": case.optimizer,
        **({"precision": "fp8"} if case.fp8 else {}),
        **({"bf16_stochastic_round": case.bf16_weights} if adapter == "full" else {}),
        **({"optimizer_in_bwd": True, "max_grad_norm": 0.0} if case.optimizer_in_backward else {}),
    }
    base = {"name": ALL_BASES[case.base], "quantization": "int4" if case.kind in ("qlora", "qdora") else "none"}
    manifest = {
        "name": "expert-memory-grid",
        "version": "0.1.0",
        "schema_version": "2.0",
        "description": "Random documents.",
        "base_models": [{**base, "prompt_template": "chatml"}],
        "training": {"dataset": {"path": "rows.jsonl", "format": "jsonl"}, "config": config},
    }
    (folder / "rows.jsonl").write_text('{"instruction": "a", "response": "b"}\n', encoding="utf-8")
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return path
