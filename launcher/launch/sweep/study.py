"""The Optuna study of a sweep in an SQLite file: trials, their states and values, and which one is tried next."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.core.errors import InputError, RunFailedError, first_line
from launcher.launch.sweep.space import Param, list_grid

if TYPE_CHECKING:
    import optuna

STUDY_FILE = "study.db"
_NAME = "sweep"
_RANDOM_TRIALS = 5  # before the sampler learns from results
_TRIALS_BEFORE_PRUNING = 3  # completed ones, whose median a trial is compared with
_LOCK_SECONDS = 30  # how long a locked database is waited for

Status = Literal["running", "done", "pruned", "infeasible", "failed", "repeated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """One trial of a sweep, as stored in the study."""

    number: int
    values: Mapping[str, str]  # by key, as the text of --set
    status: Status
    objective: float | None
    seconds: float
    reason: str
    reported: tuple[int, ...] = ()  # positions in the run whose evaluation is known to the pruner
    is_pruned: bool = False  # decided; the run may not have stopped yet

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return the parameters as KEY=VALUE, for --set."""
        return tuple(f"{key}={value}" for key, value in self.values.items())


def check_optuna() -> None:
    """Refuse a sweep if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise InputError("launcher sweep needs optuna", hint="pip install 'expert-launcher[sweep]'")


class SweepStudy:
    """Trials of one sweep. Without a folder they are kept in memory only."""

    def __init__(
        self, folder: Path | None, params: Sequence[Param], *, maximizes: bool, seed: int, num_trials: int
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        self._params, self._seed = params, seed
        self._file = None if folder is None else folder / STUDY_FILE
        with self._storage_errors():
            storage: Any = None
            if self._file is not None:
                timeout = {"connect_args": {"timeout": _LOCK_SECONDS}}
                storage = optuna.storages.RDBStorage(f"sqlite:///{self._file}", engine_kwargs=timeout)
            self._study = optuna.create_study(
                storage=storage,
                study_name=_NAME,
                direction="maximize" if maximizes else "minimize",
                pruner=optuna.pruners.MedianPruner(n_startup_trials=_TRIALS_BEFORE_PRUNING),
                load_if_exists=True,
            )
            grid = list_grid(params, num_trials)
            for values in grid or ():
                self._study.enqueue_trial(values, skip_if_exists=True)

    @property
    def trials(self) -> list[TrialRecord]:
        """Return all trials whose parameters are chosen, in order."""
        with self._storage_errors():
            frozen = self._study.get_trials(deepcopy=False)
        return [_make_record(trial, self._params) for trial in frozen if _is_chosen(trial, self._params)]

    def ask(self) -> TrialRecord:
        """Choose the parameters of the next trial; they depend on the seed, its number and the finished trials."""
        import optuna

        with self._storage_errors():
            finished = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.FAIL)
            for trial in self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
                if not _is_chosen(trial, self._params):  # killed while its parameters were chosen
                    self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            number = len(self._study.get_trials(deepcopy=False, states=finished))
            self._study.sampler = optuna.samplers.TPESampler(
                seed=self._seed + number, n_startup_trials=_RANDOM_TRIALS, constant_liar=False
            )
            trial_number = self._study.ask({param.key: _make_distribution(param) for param in self._params}).number
        return next(trial for trial in self.trials if trial.number == trial_number)

    def report(self, trial: TrialRecord, position: int, value: float) -> bool:
        """Store an evaluation of a running trial; return whether to prune it: it is worse than the others' median."""
        import optuna

        with self._storage_errors():
            live = optuna.trial.Trial(self._study, self._find(trial)._trial_id)
            live.report(value, position)
            is_pruned = bool(live.should_prune())
            if is_pruned:
                live.set_user_attr("pruned", True)
            return is_pruned

    def finish(
        self,
        trial: TrialRecord,
        status: Status,
        *,
        objective: float | None = None,
        seconds: float = 0.0,
        reason: str = "",
    ) -> None:
        """Store how a trial ended. An infeasible one is stored as pruned, so that the sampler avoids its parameters."""
        from optuna.trial import Trial, TrialState

        with self._storage_errors():
            live = Trial(self._study, self._find(trial)._trial_id)
            for name, value in (("status", status), ("seconds", seconds), ("reason", reason), ("objective", objective)):
                live.set_user_attr(name, value)
            if objective is not None and status != "pruned":
                self._study.tell(trial.number, objective)
            else:
                state = TrialState.FAIL if status == "failed" else TrialState.PRUNED
                self._study.tell(trial.number, state=state)

    def _find(self, trial: TrialRecord) -> optuna.trial.FrozenTrial:
        return next(each for each in self._study.get_trials(deepcopy=False) if each.number == trial.number)

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Raise RunFailedError in place of errors of the study's database: a full disk, a lock, a damaged file."""
        from optuna.exceptions import OptunaError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (SQLAlchemyError, OptunaError, OSError) as error:
            cause = getattr(error, "orig", None) or error.__cause__ or error
            raise RunFailedError(
                f"{self._file}: the study cannot be read or written: {first_line(cause)}",
                hint="free disk space or end the program that locks it, then repeat the command: it continues",
            ) from None


def _is_chosen(trial: optuna.trial.FrozenTrial, params: Sequence[Param]) -> bool:
    return bool(trial.params.keys() >= {param.key for param in params})


def _make_record(trial: optuna.trial.FrozenTrial, params: Sequence[Param]) -> TrialRecord:
    attributes = trial.user_attrs
    is_finished = trial.state.is_finished()
    return TrialRecord(
        number=trial.number,
        values={param.key: param.format(trial.params[param.key]) for param in params},
        status=attributes.get("status", "failed") if is_finished else "running",
        objective=attributes.get("objective") if is_finished else None,
        seconds=float(attributes.get("seconds", 0.0)),
        reason=str(attributes.get("reason", "")),
        reported=tuple(trial.intermediate_values),
        is_pruned=bool(attributes.get("pruned")),
    )


def _make_distribution(param: Param) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if param.choices:
        return CategoricalDistribution(param.choices)
    if param.is_integer:
        return IntDistribution(int(param.low), int(param.high), log=param.is_log)
    return FloatDistribution(param.low, param.high, log=param.is_log)
