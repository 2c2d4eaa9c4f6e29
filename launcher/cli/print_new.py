"""Print a new expert: the inferred settings with their reasons, one row's loss mask, and the plan in short."""

from __future__ import annotations

import shlex

from launcher.cli.print_audit import print_segments
from launcher.cli.tables import print_table
from launcher.core.errors import escape
from launcher.core.units import format_count, format_duration, format_gib, format_percent
from launcher.hardware.model import format_hardware
from launcher.new_expert.create import NewExpert
from launcher.plan.model import Plan

# The decisions of a plan that a new user looks at first.
_SHOWN_DECISIONS = ("profile", "precision", "adapter", "global batch", "batch split", "strategy", "training length")


def print_new_expert(new_expert: NewExpert) -> None:
    """Print what was inferred, the loss mask of a row, the plan, and the next commands."""
    proposal = new_expert.proposal
    source, mask = proposal.profile.source, proposal.mask
    print(f"{escape(str(source.path))}: {proposal.num_rows:,} rows ({source.format})\n")
    rows = [(guess.name, guess.value, guess.reason) for guess in proposal.guesses]
    print_table(("setting", "value", "reason"), rows, styles=("cyan", "bold", ""))
    for note in proposal.notes:
        print(f"note: {escape(note)}")
    share = format_percent(mask.num_trained / max(1, mask.num_tokens))
    print(
        f"\nRow {mask.row} in template {mask.template}; lines with | are trained: {mask.num_trained:,} of "
        f"{mask.num_tokens:,} tokens ({share}), counted with the tokenizer of {escape(mask.tokenizer)}"
    )
    for note in mask.notes:
        print(f"({escape(note)})")
    print_segments(mask.segments)
    if new_expert.plan is not None:
        _print_plan(new_expert.plan.plan)
    _print_next_steps(new_expert)


def _print_plan(plan: Plan) -> None:
    print(f"\nPlan for this machine ({escape(format_hardware(plan.hardware))}), in short:")
    decisions = {decision.name: decision for decision in plan.decisions}
    rows = [(name, decisions[name].value, decisions[name].reason) for name in _SHOWN_DECISIONS if name in decisions]
    print_table(("decision", "value", "reason"), rows, styles=("cyan", "bold", ""))
    memory, speed = plan.memory, plan.speed
    print(f"memory per rank: {format_gib(memory.total_bytes)} of {format_gib(memory.device_bytes)}")
    if speed.tokens_per_second is not None and speed.total_seconds is not None:
        print(
            f"speed: about {format_count(speed.tokens_per_second)} tokens/s, about "
            f"{format_duration(speed.total_seconds)} in total"
        )


def _print_next_steps(new_expert: NewExpert) -> None:
    folder = escape(str(new_expert.folder))
    if not new_expert.files:
        print("\n" + "\n".join(map(escape, new_expert.manifest.splitlines())))
        print(f"Dry run: nothing was written. The folder would be {folder}/.")
        return
    names = ", ".join(str(file.relative_to(new_expert.folder)) for file in new_expert.files)
    print(f"\nWritten to {folder}/: {names}. The manifest is valid and can be planned.")
    if len(new_expert.files) > 1:
        print("(sample/ holds some of your rows: without a GPU, the smoke profile trains and evaluates on them.)")
    quoted = shlex.quote(new_expert.cli_name)
    print(f"Next:  launcher train {quoted}")
    print(f"       launcher plan {quoted} --gpu rtx4090    # every decision, for any GPU of the catalogue")
