"""`launcher plan`: print how an expert would be trained: settings with reasons, memory, time, cost and disk space."""

from __future__ import annotations

import argparse

from launcher.cli.tables import format_bar, print_json, print_table
from launcher.core.errors import ExitCode, escape
from launcher.core.units import (
    MIB,
    bytes_to_gib,
    format_cost,
    format_count,
    format_duration,
    format_gib,
    format_percent,
)
from launcher.hardware.model import Hardware, format_hardware
from launcher.plan.checkpoints import count_state_bytes
from launcher.plan.estimate.dataset_size import estimate_prepared_bytes
from launcher.plan.model import MemoryPlan, Plan
from launcher.request.arguments import add_request_arguments, make_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a plan."""
    add_request_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Print the plan of an expert."""
    from launcher.request.request import plan_request

    planned = plan_request(make_request(arguments))
    if arguments.json:
        print_json(planned.plan)
        return ExitCode.DONE
    print_plan(planned.plan)
    return ExitCode.DONE


def print_plan(plan: Plan) -> None:
    """Print a plan to stdout."""
    print(f"{plan.expert} on {escape(format_hardware(plan.hardware))}\n")
    rows = [(d.name, d.value, d.reason, d.decided_by) for d in plan.decisions]
    print_table(("setting", "value", "why", "decided by"), rows, styles=("cyan", "bold", "", "dim"))
    for note in plan.notes:
        print(f"note: {escape(note)}")
    _print_memory(plan.memory, plan.hardware)
    _print_speed(plan)
    print(f"Disk:  {_describe_disk(plan)}")
    if plan.oom_fallbacks:
        print("\nOOM fallbacks, in order (global batch unchanged):")
        for number, fallback in enumerate(plan.oom_fallbacks, 1):
            print(f"  {number}. {fallback.action}: {format_gib(fallback.predicted_bytes)}")


def _print_memory(memory: MemoryPlan, hardware: Hardware) -> None:
    print(f"\nPredicted {'VRAM' if hardware.gpu is not None else 'memory'} per rank:")
    sizes = [(term.name, term.num_bytes, term.note) for term in memory.terms if term.num_bytes]
    sizes.append(("total", memory.total_bytes, _describe_margin(memory)))
    rows = [(name, format_gib(size), format_bar(size / memory.device_bytes), note) for name, size, note in sizes]
    head = ("part", "size", f"of {format_gib(memory.device_bytes)}", "contents")
    print_table(head, rows, styles=("cyan", "bold", "green", ""))
    if memory.host_bytes:
        ram = f"{hardware.ram_gib_per_node:.0f} GiB{' (assumed; --ram sets it)' * hardware.is_ram_assumed}"
        print(f"CPU memory per rank: {format_gib(memory.host_bytes)}; a node has {ram}")


def _describe_margin(memory: MemoryPlan) -> str:
    held = memory.device_bytes - memory.free_bytes
    others = f", {format_gib(held)} in use by other processes" if held > 0 else ""
    return (
        f"{bytes_to_gib(memory.usable_bytes):.1f} GiB usable{others}; "
        f"{format_gib(memory.margin_bytes)} unused, plus {format_gib(memory.headroom_bytes)} headroom"
    )


def _print_speed(plan: Plan) -> None:
    speed = plan.speed
    if speed.tokens_per_second is None or speed.seconds_per_step is None:
        print(f"\nSpeed: {escape(speed.confidence)}")
        return
    mfu = f", {format_percent(speed.mfu)} MFU" if speed.mfu is not None else ""
    print(
        f"\nSpeed: about {format_count(speed.tokens_per_second)} tokens/s, {speed.seconds_per_step:.2f} s per step{mfu}"
    )
    if speed.communication_fraction > 0.1:
        resource = "CPU memory" if plan.hardware.num_ranks == 1 else "links between GPUs"
        print(f"{format_percent(speed.communication_fraction)} of a step is spent waiting for {resource}.")
    if speed.total_seconds is not None:
        print(f"Time:  about {format_duration(speed.total_seconds)} for all steps{_format_cost(plan)}")
    print(f"       ({escape(speed.confidence)})")


def _describe_disk(plan: Plan) -> str:
    data, schedule = plan.data, plan.schedule
    if data.num_rows is None:
        prepared = "prepared data of 5 bytes per token"
    else:
        size = estimate_prepared_bytes(data.num_rows, min(data.mean_tokens, plan.batch.sequence_length))
        prepared = f"{'under 1 MiB' if size < MIB else f'about {format_gib(size)}'} of prepared data"
    if schedule.save_every_steps is None and schedule.save_every_epochs is None:
        return prepared
    kept = "all are kept" if schedule.save_total_limit is None else f"the last {schedule.save_total_limit} are kept"
    state_bytes = count_state_bytes(plan.precision.trainable_dtype, plan.optimizer.name)
    checkpoint = format_gib(state_bytes * plan.adapter.trainable_parameters)
    return f"{prepared}; checkpoints of up to {checkpoint}, {kept}"


def _format_cost(plan: Plan) -> str:
    speed = plan.speed
    if speed.cost is None:
        has_price = speed.price_per_gpu_hour is not None or plan.hardware.gpu is None
        return "" if has_price else "; --price 0.40 (per GPU-hour) adds the cost"
    cost = format_cost(speed.cost, speed.currency)
    return f", cost {'' if cost.startswith('under') else 'about '}{cost} at {speed.format_price()}"
