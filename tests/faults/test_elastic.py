"""Two nodes that meet by c10d, and a rank that is killed: all ranks come back, and go on from the last checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from launcher import metrics
from launcher.launch import ACCELERATE
from launcher.render import Rendezvous, render_command
from tests.conftest import ROOT
from tests.distributed.bench import LIMIT_SECONDS, Bench, Cell, Trained, find_port, write_bench

FAILING = str(ROOT / "tests/faults/failing_train.py")
CONFIG = {"max_steps": 4, "eval_steps": 4, "save_steps": 2, "load_best_model_at_end": False, "save_total_limit": 9}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return write_bench(tmp_path_factory.mktemp("elastic"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_comes_back(bench: Bench, rank: int, tmp_path: Path) -> None:
    cell = Cell(strategy="ddp", ranks_per_node=1, nodes=2, config=CONFIG, global_batch=4, micro_batch=2)
    whole = bench.train_here(cell.alone)
    planned, paths = bench.write(cell)
    port = find_port()
    death = f"{rank}:3:{tmp_path / 'died'}"  # the first micro-step behind the checkpoint of step 2
    with ExitStack() as stack:
        children = []
        for node in range(2):
            meeting = Rendezvous(host="127.0.0.1", port=port, backend="c10d", max_restarts=2, is_host=node == 0)
            command = render_command(
                planned.plan, paths, rendezvous=meeting, machine_rank=node, script=FAILING, accelerate=ACCELERATE
            )
            children.append(stack.enter_context(bench.started(command, LAUNCHER_TEST_DEATH=death)))
        ended = [child.wait(LIMIT_SECONDS) for child in children]
    consoles = "\n".join(one.console[-3000:] for one in ended)
    assert [one.returncode for one in ended] == [0, 0], consoles
    assert (tmp_path / "died").exists()
    assert "resuming after step 2" in consoles
    trained = Trained(paths)
    assert trained.outcome.status == "done"
    assert [attempt.from_step for attempt in trained.outcome.attempts] == [0, 2]
    assert trained.packs == whole.packs, "each step once"
    assert trained.values(metrics.TRAIN_LOSS) == pytest.approx(whole.values(metrics.TRAIN_LOSS), rel=1e-5)
