"""Generate answers for held-out rows and judge them: `launcher eval`."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.core.errors import LauncherError
from launcher.core.log import get_logger
from launcher.core.progress import Progress
from launcher.core.run_paths import RunEntry, RunPaths, write_text_atomically
from launcher.corpus.heldout import HeldOutRows, load_held_out_rows
from launcher.corpus.spec import make_preparation_spec
from launcher.corpus.tokenizer import load_planned_tokenizer
from launcher.judges.registry import open_judge, resolve_judge_name
from launcher.manifest import Manifest, find_manifest, load_manifest
from launcher.manifest.model import Decoding, Evaluation
from launcher.manifest.trust import check_trust, list_code, list_judge_code
from launcher.plan.model import Plan
from launcher.request.request import Request, base_folders, plan_request
from launcher.training.inference.answer_length import choose_new_tokens
from launcher.training.inference.grade import GeneratedAnswers, grade
from launcher.training.inference.trained_run import TrainedRun, check_adapter, load_trained_run
from launcher.training.runtime.parent_watch import exit_with_parent
from launcher.training.runtime.process_output import silence_transformers
from launcher.training.runtime.subcommand import run_subcommand

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalTarget:
    """What is evaluated: a run, an adapter from elsewhere, or the base without adapter."""

    title: str  # `run neo4j-…`, `adapter …`, `base …`
    plan: Plan
    manifest: Manifest
    run: TrainedRun | None  # None: the base without adapter

    def load(self) -> Any:
        """Load the model on the GPU if it fits, in the dtype in which the base was published."""
        from launcher.training.inference.generate import load_base_for_generation, load_for_generation

        return load_base_for_generation(self.plan) if self.run is None else load_for_generation(self.run)


class _AdapterFolder(RunPaths):
    """Paths of an adapter without a run directory: the folder itself contains the adapter."""

    adapter = RunEntry(".")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = _make_parser().parse_args(argv)
    exit_with_parent()
    return run_subcommand("eval", lambda: _evaluate(arguments), is_json=arguments.json)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.training.inference.eval", description=__doc__)
    parser.add_argument("--run", type=Path, metavar="DIR")
    parser.add_argument("--expert", metavar="NAME")
    parser.add_argument("--adapter", type=Path, metavar="DIR")
    parser.add_argument("--profile", default="auto")
    parser.add_argument("--rows", type=int, metavar="N")
    parser.add_argument("--split", choices=("test", "validation"))
    parser.add_argument("--batch-size", type=int, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, metavar="N")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="print nothing on stdout")
    return parser


def _resolve_target(arguments: argparse.Namespace) -> EvalTarget:
    if arguments.run is not None:
        run = load_trained_run(arguments.run)
        manifest = choose_judge(run, arguments.expert)
        check_trust(list_judge_code(manifest), arguments.run)
        return EvalTarget(title=f"run {run.paths.run_id}", plan=run.plan, manifest=manifest, run=run)
    planned = plan_request(Request(expert=arguments.expert, profile=arguments.profile))
    check_trust(list_code(planned.loaded.manifest), planned.loaded.path)
    plan, manifest, adapter = planned.plan, planned.loaded.manifest, arguments.adapter
    if adapter is None:
        return EvalTarget(title=f"base {plan.base.name}", plan=plan, manifest=manifest, run=None)
    check_adapter(adapter)
    run = TrainedRun(paths=_AdapterFolder(adapter), plan=plan, manifest=manifest, outcome=None)
    return EvalTarget(title=f"adapter {adapter}", plan=plan, manifest=manifest, run=run)


def choose_judge(run: TrainedRun, expert: str | None) -> Manifest:
    """Return the run's manifest, with the judge of `expert`'s current manifest if named; log if the judges differ."""
    try:
        current = load_manifest(find_manifest(expert or run.plan.expert))
    except LauncherError:
        if expert is None:  # the manifest may be gone: the run has its own
            return run.manifest
        raise
    now, then = _describe_judge(current.manifest), _describe_judge(run.manifest)
    if now == then:
        return run.manifest
    if expert is None:
        log.info(
            f"note: {_format_judged(then)}, as in the run's manifest; {current.path} now names {now or 'no judge'}: "
            f"`launcher eval {run.plan.expert} --run {run.paths.run_id}` uses it"
        )
        return run.manifest
    log.info(f"note: {_format_judged(now)}, as in {current.path}; the run was trained with {then or 'no judge'}")
    check_trust(list_judge_code(current.manifest), current.path)
    evaluation = current.manifest.evaluation or Evaluation(judge=resolve_judge_name(current.manifest))
    if not evaluation.judge_command:
        evaluation = evaluation.model_copy(update={"judge": resolve_judge_name(current.manifest)})
    return run.manifest.model_copy(update={"evaluation": evaluation})


def _describe_judge(manifest: Manifest) -> str | None:
    if manifest.evaluation is not None and manifest.evaluation.judge_command:
        return f"judge_command {shlex.join(manifest.evaluation.judge_command)}"
    return resolve_judge_name(manifest)


def _format_judged(judge: str | None) -> str:
    return "not judged" if judge is None else f"judged by {judge}"


def _evaluate(arguments: argparse.Namespace) -> str:
    target = _resolve_target(arguments)
    plan, folder = target.plan, Path(target.plan.data.folder)
    with closing(open_judge(target.manifest)) as judge:  # reports missing tools before the model is loaded
        tokenizer = load_planned_tokenizer(plan, base_folders(folder))
        held_out = load_held_out_rows(make_preparation_spec(plan, folder, tokenizer), arguments.rows, arguments.split)
        limits = choose_new_tokens(held_out.rows, tokenizer, plan, arguments.max_new_tokens)
        generated = _generate(target, held_out, limits, arguments.batch_size)
        log.info(f"judging {len(generated.answers):,} answers")
        result = grade(judge, held_out, generated, title=target.title, plan=plan, manifest=target.manifest)
    write_text_atomically(arguments.out, result.model_dump_json(indent=1) + "\n")
    return "" if arguments.quiet else str(arguments.out)


def _generate(
    target: EvalTarget, held_out: HeldOutRows, limits: Sequence[int], batch_size: int | None
) -> GeneratedAnswers:
    from launcher.training.inference.generate import Answer, load_generator

    silence_transformers()
    log.info(f"evaluating {target.title}: {len(held_out.rows)} of {held_out.num_rows} {held_out.split} rows")
    generator = load_generator(
        target.load(),
        target.plan,
        decoding=target.manifest.training.decoding or Decoding(),
        max_new_tokens=max(limits),
        batch_size=batch_size,
    )
    began = time.monotonic()
    answers: dict[int, Answer] = {}
    with Progress(len(held_out.rows)) as progress:
        for limit in sorted(set(limits)):
            chosen = [index for index, own in enumerate(limits) if own == limit]
            prompts = [held_out.rows[index].prompt for index in chosen]
            answers |= zip(chosen, generator.generate(prompts, progress.advance, limit), strict=True)
    return GeneratedAnswers(
        answers=[answers[index] for index in range(len(limits))],
        max_new_tokens=max(limits),
        seconds=time.monotonic() - began,
    )


if __name__ == "__main__":
    sys.exit(main())
