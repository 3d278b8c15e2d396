"""`headrace up`: a whole fleet, from its start to its goal and its drain."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from headrace.deploy.fleet import Fleet
from headrace.deploy.fleet_errors import DrainCutShortError, GoalTimeoutError
from headrace.deploy.goal import Goal, RunNumbers
from headrace.deploy.logs import Identity, set_up_logging
from headrace.deploy.progress import ProgressDisplay, ProgressView
from headrace.deploy.run_dir import RunDir
from headrace.deploy.run_log import HURRIED_CLOSE_S, RunLog, run_info
from headrace.deploy.stop_signals import StopSignals
from headrace.deploy.summary import Summary, summarise
from headrace.schemas.config import FleetConfig
from headrace.schemas.errors import HeadraceError

log = logging.getLogger("headrace.supervisor")

TICK_S = 0.25


@dataclass(frozen=True)
class UpOptions:
    """Options of `up` beyond the configuration."""

    json: bool = False
    config_path: Path | None = None
    config_origin: str = "defaults"


@dataclass
class RunOutcome:
    """The outcome of a run; filled in during the run."""

    began: float
    start: RunNumbers = field(default_factory=RunNumbers)
    at_goal: RunNumbers | None = None
    failure: HeadraceError | None = None
    seconds: float = 0.0


def up(config: FleetConfig, options: UpOptions) -> Summary:
    """Run a fleet until its goal, its timeout, a failure or a signal; drain it; return its summary.

    Raises only errors from before the fleet exists (`RunDirError`, `ConfigError`, `KeysError`); later errors are in the
    summary.
    """
    with RunDir(Path(config.fleet.run_dir)) as run_dir, StopSignals() as signals:
        origin = str(options.config_path.absolute()) if options.config_path else None
        with Fleet(config, run_dir, signals, origin) as fleet:
            set_up_logging(Identity(fleet.fleet_id, "supervisor"), file=run_dir.logs / "supervisor.log")
            outcome = RunOutcome(began=time.monotonic())
            with RunLog(config, run_info(config, fleet.fleet_id, run_dir.path)) as run_log:
                try:
                    fleet.start()
                    outcome.start = fleet.numbers_before
                    _announce(fleet, options)
                    with ProgressDisplay(sys.stderr if options.json else sys.stdout) as progress:
                        _run(fleet, outcome, progress, run_log)
                except HeadraceError as error:
                    outcome.failure = error
                outcome.seconds = time.monotonic() - outcome.began
                _drain(fleet, outcome, run_log)
                _log_rows(fleet, run_log, last=True)
            outcome.failure = outcome.failure or fleet.supervisor.failure
            return _summarise(fleet, outcome)


def _announce(fleet: Fleet, options: UpOptions) -> None:
    endpoints = ", ".join(f"{name} {endpoint}" for name, endpoint in fleet.endpoints.items())
    log.info(
        "headrace %s up: fleet %s in %s, %d workers on %s; %s; config: %s",
        version("headrace"),
        fleet.fleet_id,
        fleet.run_dir.path,
        fleet.config.fleet.workers,
        fleet.config.sampling.env,
        endpoints,
        options.config_origin,
    )


def _log_rows(fleet: Fleet, run_log: RunLog, *, last: bool = False) -> None:
    restarts, learner_rows, evaluations = (
        fleet.supervisor.restarts(),
        fleet.take_learner_rows(),
        fleet.take_evaluations(),
    )
    run_log.observe(fleet.snapshot, restarts, learner_rows, evaluations, last=last)


def _run(fleet: Fleet, outcome: RunOutcome, progress: ProgressDisplay, run_log: RunLog) -> None:
    """Turn the loop until there is a reason to stop. Raises the failure or the timeout, if that is the reason."""
    goal = Goal.of(fleet.config.fleet)
    while not fleet.stop_asked:
        fleet.loop.turn(TICK_S)
        _log_rows(fleet, run_log)
        if fleet.supervisor.failure is not None:
            raise fleet.supervisor.failure
        seconds, now = time.monotonic() - outcome.began, fleet.numbers()
        reached = goal.reached(now, outcome.start)
        restarts, evaluation = fleet.supervisor.restarts(), fleet.newest_evaluation
        view = ProgressView.of(fleet.snapshot, seconds, goal, restarts, fleet.redis_age_s, evaluation)
        progress.show(view, last=reached)
        if reached:
            outcome.at_goal = now
            log.info("goal reached after %.1f s (%s); draining", seconds, _where(now))
            return
        if goal.late(seconds):
            raise GoalTimeoutError(goal.timeout_s or seconds, _where(now))
    log.info("draining after a signal; another one stops at once")


def _where(now: RunNumbers) -> str:
    mean = "no episode has ended" if now.mean_return is None else f"mean return {now.show_mean_return()}"
    return f"{now.steps:,} steps, {mean}"


def _drain(fleet: Fleet, outcome: RunOutcome, run_log: RunLog) -> None:
    try:
        fleet.drain()
    except DrainCutShortError as error:
        outcome.failure = outcome.failure or error
        run_log.close_s = HURRIED_CLOSE_S


def _summarise(fleet: Fleet, outcome: RunOutcome) -> Summary:
    snapshot = fleet.snapshot
    return summarise(
        fleet_id=fleet.fleet_id,
        run_dir=str(fleet.run_dir.path),
        seconds=outcome.seconds,
        start=outcome.start,
        end=fleet.numbers(),
        at_goal=outcome.at_goal,
        restarts=fleet.supervisor.restarts(),
        weights_seq=int(snapshot.gauges.get("weights_seq", 0)) if snapshot else 0,
        ledger=snapshot.fleet if snapshot else None,
        failure=outcome.failure,
    )
