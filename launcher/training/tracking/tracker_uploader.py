"""Log a run to TensorBoard or MLflow: `python -m launcher.training.tracking.tracker_uploader RUN_DIR --to mlflow`.

Like the W&B uploader it is a process of its own and reads only files that the training writes: a server that does not
respond cannot hold up the training.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.core.errors import ExitCode, LauncherError, first_line
from launcher.core.log import get_logger
from launcher.core.metrics import StepMetrics
from launcher.core.run_files import load_model_or_none
from launcher.core.run_paths import RunPaths, write_text_atomically
from launcher.plan import Plan, load_plan
from launcher.runs.record import MlflowTrace, load_outcome
from launcher.runs.wandb_settings import make_config, make_summary
from launcher.training.tracking.follow_run import POLL_SECONDS, MetricsTail, detach_uploader, has_ended
from launcher.training.tracking.tracker_process import TITLES

log = get_logger(__name__)

_TRACE = "mlflow.json"  # in the run directory
_RETRY_SECONDS = 10.0
_FINISH_SECONDS = 40.0  # for rows that a server did not take at once
_MAX_PARAMETER_LENGTH = 500
_BATCH_SIZE = 500  # metrics per request; MLflow allows 1,000
_REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class TensorBoard:
    """Writes TensorBoard event files of the complete run into its directory, replacing those of an earlier attempt."""

    def __init__(self, plan: Plan, paths: RunPaths) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        folder = paths.root / "tensorboard"
        for file in folder.glob("events.out.tfevents.*"):
            file.unlink()
        self._writer = EventFileWriter(str(folder))
        self.logged_seconds, self._step = 0.0, 0  # rows up to that time of the run are logged already
        self.place = f"tensorboard --logdir {paths.root.parent}"
        self._add_text("config", "\n".join(f"- {name}: {value}" for name, value in _make_flat_config(plan).items()))

    def log(self, rows: Sequence[StepMetrics], logged_seconds: float) -> None:  # noqa: ARG002
        """Write one event per row. If a step is repeated, TensorBoard hides the events from that step on."""
        for row in rows:
            if row.step < self._step:
                start = self._event.SessionLog(status=self._event.SessionLog.START)
                self._add(self._event.Event(step=row.step, session_log=start))
            values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._add(self._event.Event(step=row.step, summary=self._summary.Summary(value=values)))
            self._step = row.step
        self._writer.flush()

    def finish(self, summary: Mapping[str, object], status: str) -> None:
        """Write the outcome as a text and close the file."""
        self._add_text("outcome", "\n".join(f"- {name}: {value}" for name, value in summary.items()) or status)
        self._writer.close()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)

    def _add_text(self, tag: str, text: str) -> None:
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        value = self._summary.Summary.Value(
            tag=tag, tensor=make_tensor_proto([text.encode()]), metadata=create_summary_metadata(tag, "")
        )
        self._add(self._event.Event(step=self._step, summary=self._summary.Summary(value=[value])))


class Mlflow:
    """Logs to the server of MLFLOW_TRACKING_URI; a resumed run continues its MLflow run."""

    def __init__(self, plan: Plan, paths: RunPaths) -> None:
        for name, value in _REQUEST_LIMITS.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Metric, Param, RunStatus, RunTag
        from mlflow.tracking import MlflowClient

        self._metric, self._client, self._file = Metric, MlflowClient(), paths.root / _TRACE
        trace = _load_trace(self._file)
        if trace is None:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or plan.wandb.project
            found = self._client.get_experiment_by_name(experiment)
            experiment_id = self._client.create_experiment(experiment) if found is None else found.experiment_id
            name = plan.wandb.name or paths.run_id
            run = self._client.create_run(experiment_id, run_name=name, tags={"expert": plan.expert})
            trace = MlflowTrace(run_id=run.info.run_id, experiment_id=experiment_id)
        self._run_id, self._trace, self.logged_seconds = trace.run_id, trace, trace.logged_seconds
        self._client.update_run(self._run_id, status=RunStatus.to_string(RunStatus.RUNNING))
        if not self.logged_seconds:
            parameters = [Param(name, str(value)) for name, value in _make_flat_config(plan).items()]
            tags = [RunTag("tags", ", ".join(plan.wandb.tags))] if plan.wandb.tags else []
            self._client.log_batch(self._run_id, params=parameters, tags=tags)
        self._save_trace(self.logged_seconds)
        self.place = f"experiment {trace.experiment_id}, run {self._run_id}"

    def log(self, rows: Sequence[StepMetrics], logged_seconds: float) -> None:
        """Send the finite values of all rows, the last of which is at `logged_seconds`; raise if the server refuses."""
        now = int(time.time() * 1000)
        entities = [
            self._metric(name, value, now, row.step)
            for row in rows
            for name, value in row.values.items()
            if math.isfinite(value)
        ]
        for start in range(0, len(entities), _BATCH_SIZE):
            self._client.log_batch(self._run_id, metrics=entities[start : start + _BATCH_SIZE])
        self._save_trace(logged_seconds)

    def finish(self, summary: Mapping[str, object], status: str) -> None:
        """Log the outcome and set the status of the MLflow run."""
        for name, value in summary.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._client.log_metric(self._run_id, f"summary/{name}", float(value))
        self._client.set_tag(self._run_id, "status", status)
        self._client.set_terminated(self._run_id, {"done": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))

    def _save_trace(self, logged_seconds: float) -> None:
        self._trace = self._trace.model_copy(update={"logged_seconds": logged_seconds})
        with suppress(LauncherError):  # disk full: rows are logged twice after a restart
            write_text_atomically(self._file, self._trace.model_dump_json())


Backend = TensorBoard | Mlflow
BACKENDS: dict[str, type[Backend]] = {"tensorboard": TensorBoard, "mlflow": Mlflow}


def main() -> int:
    """Log a run to TensorBoard or MLflow until its training ends; return the exit code."""
    parser = argparse.ArgumentParser(prog="launcher.training.tracking.tracker_uploader", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--to", choices=tuple(BACKENDS), required=True)
    parser.add_argument("--parent", type=int, default=0, help="process id of the training; 0: log what is there")
    options = parser.parse_args()
    paths, title = RunPaths(options.run_dir), TITLES[options.to]
    detach_uploader(paths.logs / f"{options.to}.log", options.parent)
    try:
        backend = BACKENDS[options.to](load_plan(paths.plan), paths)
        log.info(f"{title}: {backend.place}")
        follow(paths, backend, options.parent)
    except Exception as error:  # of any library; the training continues
        log.info(f"{title}: not logged completely: {type(error).__name__}: {first_line(error)}")
        return int(ExitCode.RUN_FAILED)
    return int(ExitCode.DONE)


def follow(paths: RunPaths, backend: Backend, parent: int) -> None:
    """Log new rows until the training has ended, then the outcome. A failed request is repeated later."""
    tail = MetricsTail(paths.metrics, logged_seconds=backend.logged_seconds)
    waiting: list[StepMetrics] = []
    failure: Exception | None = None
    retry_at, give_up_at = 0.0, math.inf
    while True:
        is_over = has_ended(parent, load_outcome(paths.outcome))  # checked first: rows written before the end are read
        waiting += tail.read()
        now = time.monotonic()
        give_up_at = min(give_up_at, now + _FINISH_SECONDS) if is_over else math.inf
        if waiting and now >= retry_at:
            try:
                backend.log(waiting, tail.logged_seconds)
                waiting = []
            except Exception as error:  # of any library
                failure, retry_at = error, now + _RETRY_SECONDS
        if is_over and (not waiting or now >= give_up_at):
            break
        time.sleep(POLL_SECONDS)
    if waiting and failure is not None:
        raise failure
    outcome = load_outcome(paths.outcome)
    status = "crashed" if outcome is None or not outcome.is_final else outcome.status
    backend.finish({} if outcome is None else {**make_summary(paths, outcome), "status": status}, status)


def _load_trace(file: Path) -> MlflowTrace | None:
    return load_model_or_none(MlflowTrace, file)


def _make_flat_config(plan: Plan) -> dict[str, object]:
    """Return the settings to filter runs by, without the complete manifest and plan."""
    config = make_config(plan, None)
    return {
        name: str(value)[:_MAX_PARAMETER_LENGTH]
        for name, value in config.items()
        if isinstance(value, str | int | float)
    }


if __name__ == "__main__":
    os._exit(main())
