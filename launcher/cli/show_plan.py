"""A plan for people: each decision with its value and reason, memory as bars, then time and cost."""

from __future__ import annotations

from launcher.cli.tables import format_bar, print_table
from launcher.errors import escape
from launcher.hardware import format_hardware
from launcher.plan.model import MemoryPlan, Plan, ScalePoint, ScalingPlan
from launcher.units import bytes_to_gib, format_count, format_duration, format_gib, format_percent

_MARKS = {"manifest": "manifest", "plan": "", "command line": "flag", "hardware": "hardware", "user": "you"}


def print_plan(plan: Plan) -> None:
    print(f"{plan.expert} on {escape(format_hardware(plan.hardware))}\n")
    rows = [(d.name, d.value, d.reason, _MARKS[d.decided_by]) for d in plan.decisions]
    print_table(("decision", "value", "why", "said by"), rows, styles=("cyan", "bold", "", "dim"))
    for note in plan.notes:
        print(f"note: {escape(note)}")
    _print_memory(plan.memory, on_gpu=plan.hardware.gpu is not None)
    _print_speed(plan)
    _print_scaling(plan)
    _print_ladder(plan)


def _print_memory(memory: MemoryPlan, on_gpu: bool) -> None:
    what = "VRAM" if on_gpu else "memory"
    print(f"\nPredicted {what} of each rank:")
    terms = [term for term in memory.terms if term.num_bytes]
    rows = [
        (term.name, format_gib(term.num_bytes), format_bar(term.num_bytes / memory.card_bytes), term.note)
        for term in terms
    ]
    rows.append(
        ("total", format_gib(memory.total_bytes), format_bar(memory.total_bytes / memory.card_bytes), _verdict(memory))
    )
    print_table(
        ("part", "size", f"of {format_gib(memory.card_bytes)}", "what it is"),
        rows,
        styles=("cyan", "bold", "green", ""),
    )
    if memory.host_bytes:
        print(f"On the CPU, each rank: {format_gib(memory.host_bytes)}")


def _verdict(memory: MemoryPlan) -> str:
    held = memory.card_bytes - memory.free_bytes
    others = f", {format_gib(held)} are in use by others" if held > 0 else ""
    return (
        f"{bytes_to_gib(memory.usable_bytes):.1f} GiB usable{others}; "
        f"{format_gib(memory.margin_bytes)} spare beside {format_gib(memory.headroom_bytes)} headroom"
    )


def _print_speed(plan: Plan) -> None:
    speed = plan.speed
    if speed.tokens_per_second is None or speed.seconds_per_step is None:
        print(f"\nSpeed: {escape(speed.confidence)}")
        return
    mfu = f", {format_percent(speed.mfu)} of the peak" if speed.mfu is not None else ""
    print(
        f"\nSpeed: about {format_count(speed.tokens_per_second)} tokens/s, {speed.seconds_per_step:.2f} s a step{mfu}"
    )
    if speed.communication_fraction > 0.1:
        what = "CPU memory" if plan.hardware.num_ranks == 1 else "links between GPUs"
        print(f"{format_percent(speed.communication_fraction)} of a step is waiting for {what}.")
    if speed.total_seconds is not None:
        print(f"Time:  about {format_duration(speed.total_seconds)}" + _cost(plan))
    print(f"       ({escape(speed.confidence)})")


def _cost(plan: Plan) -> str:
    speed = plan.speed
    if speed.cost is None:
        return "" if speed.price_per_gpu_hour is not None else "; --price 0.40/h adds the cost"
    return f", cost about {speed.cost:.2f} at {speed.price_per_gpu_hour:g} per GPU and hour"


def _print_scaling(plan: Plan) -> None:
    scaling = plan.speed.scaling
    if scaling is None:
        return
    print(f"\nOn paper, {plan.batch.global_batch_size} sequences a step on fewer GPUs and on these:")
    head = (
        "GPUs",
        "strategy",
        "batch",
        "a step",
        "compute",
        "link",
        "hidden",
        "waited",
        "each sends",
        "tokens/s",
        "share",
    )
    rows = [_scaling_row(point) for point in scaling.points]
    print_table(head, rows, styles=("cyan", "", "", "bold", "", "", "dim", "", "dim", "bold", "green"))
    print(f"{escape(_name_first(scaling))}{escape(scaling.verdict)}.")
    print(f"       (assumed: {escape('; '.join(scaling.assumptions))})")


def _scaling_row(point: ScalePoint) -> tuple[str, ...]:
    nodes = "" if point.nodes == 1 else f" ({point.nodes} nodes)"
    strategy = point.strategy if point.offload == "none" else f"{point.strategy}, offload"
    sent = f"{format_gib(point.moved_bytes)}, {format_count(point.num_messages)} times" if point.num_messages else ""
    return (
        f"{point.num_ranks}{nodes}",
        strategy,
        f"{point.micro_batch_size} x {point.gradient_accumulation_steps}",
        _seconds(point.seconds_per_step),
        _seconds(point.compute_seconds),
        _seconds(point.communication_seconds),
        _seconds(point.hidden_seconds),
        _seconds(point.exposed_seconds),
        sent,
        format_count(point.tokens_per_second),
        f"{100 * point.efficiency:.0f} %",
    )


def _seconds(seconds: float) -> str:
    if seconds == 0:
        return ""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def _name_first(scaling: ScalingPlan) -> str:
    """To what shares refer."""
    first = scaling.reference_ranks
    return "" if first == 1 else f"It does not fit on fewer than {first} GPUs, unless by offloading. "


def _print_ladder(plan: Plan) -> None:
    if not plan.ladder:
        return
    print("\nIf memory runs out all the same, in this order (the global batch stays):")
    for number, rung in enumerate(plan.ladder, 1):
        print(f"  {number}. {rung.action}: {format_gib(rung.predicted_bytes)}")
