"""QLoRA with FSDP2 and HSDP: the same training as with bitsandbytes in one process, and the NF4 weights are sharded.

Run in a separate process by tests/training/kernels/test_nf4.py, which can import bitsandbytes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from launcher.core import metrics
from launcher.plan.model import QuantizationPlan
from tests.distributed.conftest import Reference, harness, initial_weights, reference  # noqa: F401
from tests.distributed.harness import Harness, TrainingCase
from tests.distributed.test_matrix import (
    BF16,
    LOSS_BF16,
    InitialWeights,
    Train,
    check_partial_steps,
    check_placement,
    check_same,
    get_case_name,
    largest_difference,
    train,  # noqa: F401
)
from tests.distributed.test_traffic import check_traffic
from tests.faults import fork_server as server_module
from tests.faults.fork_server import ForkServer
from tests.forked_python import replace_process_state

SHOWN = dict.fromkeys(server_module._SHOWN, server_module._UNMARKED)  # must be in the environment of the process
NF4 = QuantizationPlan(kind="int4", storage_dtype="uint8", double_quantization=True)
CASES = [
    TrainingCase(strategy="fsdp2", changes={"quantization": NF4}),
    pytest.param(TrainingCase(strategy="fsdp2", adapter="dora", changes={"quantization": NF4}), marks=pytest.mark.slow),
    pytest.param(TrainingCase(strategy="hsdp", nodes=2, changes={"quantization": NF4}), marks=pytest.mark.slow),
    pytest.param(
        TrainingCase(strategy="fsdp2", config={"torch_compile": True}, changes={"quantization": NF4}),
        marks=pytest.mark.slow,
    ),
]


class ForkOfThisProcess(ForkServer):
    """A fork server that is itself a fork: this process has imported bitsandbytes and all modules of a training."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.move(folder, environment)
        requests, answers = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            for descriptor in (requests[1], answers[0]):
                os.close(descriptor)
            _become_server(folder / "fork_server.txt", requests[0], answers[1], self._environment)
        for descriptor in (requests[0], answers[1]):
            os.close(descriptor)
        self._requests, self._answers = os.fdopen(requests[1], "w"), os.fdopen(answers[0])
        self._log = folder / "fork_server.txt"

    def move(self, folder: Path, environment: Mapping[str, str]) -> None:
        """Change the folder and the environment of the processes to start."""
        self.folder, self._environment = folder, {**environment, "OMP_NUM_THREADS": "1"}

    def close(self) -> None:
        self._requests.close()
        os.waitpid(self._pid, 0)

    def request(self, question: Mapping[str, object]) -> Any:
        self._requests.write(json.dumps(question) + "\n")
        self._requests.flush()
        answer = self._answers.readline()
        assert answer, self._log.read_text()[-3000:]
        return json.loads(answer)


def _become_server(log: Path, requests: int, answers: int, environment: Mapping[str, str]) -> NoReturn:
    """Give the process the standard streams of a server, of which pytest captured its own."""
    try:
        with log.open("wb") as errors, os.fdopen(answers, "wb") as output:
            replace_process_state(environment, output, errors, new_session=False)
        os.dup2(requests, 0)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        server_module.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # never back into pytest


@pytest.fixture(scope="session", autouse=True)
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkOfThisProcess | None]:
    """Fork before anything else: later this process imports DeepSpeed, and uses CUDA where there is a GPU."""
    if torch.cuda.is_available() or not SHOWN.items() <= os.environ.items():
        yield None
        return
    server = ForkOfThisProcess(tmp_path_factory.mktemp("forked"), os.environ)
    yield server
    server.close()


@pytest.fixture(scope="session")
def fork_server(forked: ForkOfThisProcess | None, harness: Harness) -> Iterator[ForkServer]:  # noqa: F811
    if forked is not None:
        forked.move(harness.folder, harness.environment)
        yield forked
        return
    server = ForkServer(harness.folder, harness.environment)
    yield server
    server.close()


@pytest.mark.parametrize("case", CASES, ids=get_case_name)
def test_sharded_nf4_weights_train_like_one_process(
    train: Train,  # noqa: F811
    reference: Reference,  # noqa: F811
    initial_weights: InitialWeights,  # noqa: F811
    case: Any,
) -> None:
    trained = train(case)
    assert trained.outcome.observed["precision"].endswith("frozen NF4")
    check_same(trained, reference(case), initial_weights(case))
    check_partial_steps(trained)
    check_placement(case, trained)


@pytest.mark.slow  # emulated on a CPU
def test_bytes_of_nf4_weights_are_gathered_unchanged_in_bf16(train: Train, reference: Reference) -> None:  # noqa: F811
    case = TrainingCase(strategy="fsdp2", changes={"quantization": NF4, **BF16})
    trained, single_process = train(case), reference(case)
    assert trained.packs == single_process.packs
    assert largest_difference(trained, single_process, metrics.TRAIN_LOSS) < LOSS_BF16


@pytest.mark.slow
def test_nf4_weights_are_gathered_in_their_own_size(harness: Harness) -> None:  # noqa: F811
    """As the plan estimates: 0.52 bytes per weight, with all scales."""
    check_traffic(harness, TrainingCase(strategy="fsdp2", changes={"quantization": NF4}))
