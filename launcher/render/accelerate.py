"""The YAML that `accelerate launch --config_file` reads.

Every setting is in one file. With DeepSpeed, its JSON has precision, accumulation, clipping, ZeRO and offload:
accelerate raises if they are here too. Addresses, ports and restarts belong to the command line: they are facts of a
launch, not of a plan, and accelerate ignores `same_network` and `rdzv_backend` here and refuses `max_restarts`.
Accumulation has no key outside DeepSpeed: train.py takes it from the plan.
"""

from __future__ import annotations

import yaml

from launcher.core.choices import FSDP_STRATEGIES, Strategy
from launcher.render.spec import LaunchSpec

DISTRIBUTED_TYPES: dict[Strategy, str] = {
    "single": "NO",
    "ddp": "MULTI_GPU",  # for CPU ranks, too: MULTI_CPU starts one process, whatever num_processes says
    "fsdp2": "FSDP",
    "hsdp": "FSDP",
    "zero1": "DEEPSPEED",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
}


def render_accelerate(spec: LaunchSpec, *, deepspeed_config_file: str | None, header: str = "") -> str:
    """Return the accelerate YAML of a launch spec; the DeepSpeed file is named in it for DeepSpeed strategies only."""
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": DISTRIBUTED_TYPES[spec.strategy],
        "machine_rank": 0,
        "num_machines": spec.num_nodes,
        "num_processes": spec.num_processes,  # over all nodes
        "use_cpu": spec.on_cpu,
    }
    if spec.uses_deepspeed:
        config["deepspeed_config"] = {
            "deepspeed_config_file": deepspeed_config_file,
            "deepspeed_multinode_launcher": "standard",  # accelerate's default is pdsh: ssh between the nodes
            # The only ZeRO key that belongs here: DeepSpeed's config has no key for building the model sharded.
            **({"zero3_init_flag": True} if spec.strategy == "zero3" else {}),
        }
    else:
        config["mixed_precision"] = spec.mixed_precision
    if spec.strategy in FSDP_STRATEGIES:
        config["fsdp_config"] = make_fsdp_section(spec)
    if spec.strategy == "hsdp":
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": spec.num_nodes,
            "parallelism_config_dp_shard_size": spec.ranks_per_node,
        }
    return header + yaml.safe_dump(config, sort_keys=True, default_flow_style=False)


def make_single_process_environment(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for one process, besides OMP_NUM_THREADS."""
    environment = {
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "ACCELERATE_MIXED_PRECISION": spec.mixed_precision,
        "ACCELERATE_USE_CPU": str(spec.on_cpu),
    }
    if spec.on_cpu:
        environment |= {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    return environment


def make_fsdp_section(spec: LaunchSpec) -> dict[str, object]:
    """Return the FSDP settings; accelerate ignores misspelt keys, so a test checks each against its parser."""
    section: dict[str, object] = {
        "fsdp_activation_checkpointing": False,  # training checkpoints activations itself; both at once recompute twice
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,  # one rank per node reads the weights and broadcasts them
        "fsdp_offload_params": False,  # offload is DeepSpeed's job
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,  # accelerate's default is 1
    }
    if spec.layer_class is not None:
        section["fsdp_transformer_layer_cls_to_wrap"] = spec.layer_class
    return section
