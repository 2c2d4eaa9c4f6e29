"""A rank of two nodes with c10d rendezvous is killed: all ranks restart and resume from the last checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from launcher.core import metrics
from launcher.launch.start import ACCELERATE
from launcher.render import Rendezvous, render_command
from tests.conftest import ROOT
from tests.distributed.harness import LIMIT_SECONDS, Harness, TrainedRun, TrainingCase, get_free_port, make_harness

FAILING_TRAIN_SCRIPT = str(ROOT / "tests/faults/failing_train.py")
CONFIG = {"max_steps": 4, "eval_steps": 4, "save_steps": 2, "load_best_model_at_end": False, "save_total_limit": 9}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return make_harness(tmp_path_factory.mktemp("elastic"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_restarted(harness: Harness, rank: int, tmp_path: Path) -> None:
    case = TrainingCase(strategy="ddp", ranks_per_node=1, nodes=2, config=CONFIG, global_batch=4, micro_batch=2)
    uninterrupted = harness.train_in_process(case.single_process)
    planned, paths = harness.write(case)
    port = get_free_port()
    death = f"{rank}:3:{tmp_path / 'died'}"  # the first micro-step after the checkpoint of step 2
    with ExitStack() as stack:
        children = []
        for node in range(2):
            rendezvous = Rendezvous(host="127.0.0.1", port=port, backend="c10d", max_restarts=2, is_host=node == 0)
            command = render_command(
                planned.plan,
                paths,
                rendezvous=rendezvous,
                machine_rank=node,
                script=FAILING_TRAIN_SCRIPT,
                accelerate=ACCELERATE,
            )
            children.append(stack.enter_context(harness.started(command, LAUNCHER_TEST_DEATH=death)))
        ended = [child.wait(LIMIT_SECONDS) for child in children]
    consoles = "\n".join(one.console[-3000:] for one in ended)
    assert [one.returncode for one in ended] == [0, 0], consoles
    assert (tmp_path / "died").exists()
    assert "resuming after step 2" in consoles
    trained = TrainedRun(paths)
    assert trained.outcome.status == "done"
    assert [attempt.from_step for attempt in trained.outcome.attempts] == [0, 2]
    assert trained.packs == uninterrupted.packs, "each step once"
    assert trained.values(metrics.TRAIN_LOSS) == pytest.approx(uninterrupted.values(metrics.TRAIN_LOSS), rel=1e-5)
