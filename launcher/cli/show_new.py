"""A new expert for people: what was guessed and why, one row with its mask, and the plan in short."""

from __future__ import annotations

import shlex

from launcher.cli.show_audit import print_segments
from launcher.cli.tables import print_table
from launcher.errors import escape
from launcher.hardware import format_hardware
from launcher.new_expert.making import NewExpert
from launcher.plan.model import Plan
from launcher.units import format_count, format_duration, format_gib, format_percent

# Of a plan's many decisions, those that a newcomer asks about first.
_FIRST_DECISIONS = ("profile", "precision", "adapter", "global batch", "split", "strategy", "length")


def print_new_expert(made: NewExpert) -> None:
    proposal = made.proposal
    source = proposal.seen.source
    print(f"{escape(str(source.path))}: {proposal.num_rows:,} rows ({source.format})\n")
    rows = [(guess.what, guess.value, guess.why) for guess in proposal.guesses]
    print_table(("guessed", "value", "why"), rows, styles=("cyan", "bold", ""))
    for note in proposal.notes:
        print(f"note: {escape(note)}")
    mask = proposal.mask
    share = format_percent(mask.num_trained / max(1, mask.num_tokens))
    print(
        f"\nRow {mask.row} in {mask.template}, and what of it is trained (|): {mask.num_trained:,} of "
        f"{mask.num_tokens:,} tokens ({share}) by the tokenizer of {escape(mask.tokenizer)}"
    )
    for note in mask.notes:
        print(f"({escape(note)})")
    print_segments(mask.segments)
    if made.plan is not None:
        _print_plan(made.plan.plan)
    _print_end(made)


def _print_plan(plan: Plan) -> None:
    print(f"\nThe plan for this machine ({escape(format_hardware(plan.hardware))}), in short:")
    chosen = {decision.name: decision for decision in plan.decisions}
    rows = [(name, chosen[name].value, chosen[name].reason) for name in _FIRST_DECISIONS if name in chosen]
    print_table(("decision", "value", "why"), rows, styles=("cyan", "bold", ""))
    memory, speed = plan.memory, plan.speed
    print(f"memory of each rank: {format_gib(memory.total_bytes)} of {format_gib(memory.card_bytes)}")
    if speed.tokens_per_second is not None and speed.total_seconds is not None:
        print(
            f"speed: about {format_count(speed.tokens_per_second)} tokens/s, in all about "
            f"{format_duration(speed.total_seconds)}"
        )


def _print_end(made: NewExpert) -> None:
    called = shlex.quote(made.called)
    if not made.files:
        print("\n" + "\n".join(map(escape, made.manifest.splitlines())))
        print(f"Dry run: nothing was written. It would lie in {escape(str(made.folder))}/.")
        return
    names = ", ".join(str(file.relative_to(made.folder)) for file in made.files)
    print(f"\nWritten to {escape(str(made.folder))}/: {names}. Loaded and planned: it is valid.")
    if len(made.files) > 1:
        print("(sample/ holds rows of yours: the smoke profile trains and evaluates on them where there is no GPU.)")
    print(f"Next:  launcher train {called}")
    print(f"       launcher plan {called} --gpu rtx4090    # every decision, on any card of the catalogue")
