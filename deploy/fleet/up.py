"""`headrace up`: a whole fleet, from its start to its goal and its drain."""

from __future__ import annotations

import logging
import math
import platform
import sys
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from headrace.deploy.fleet.check_process import check_before_start
from headrace.deploy.fleet.fleet import Fleet
from headrace.deploy.monitoring.bottleneck import Bottleneck, find_bottleneck
from headrace.deploy.monitoring.connecting import how_to_connect
from headrace.deploy.monitoring.findings import awaited, find
from headrace.deploy.process.child_environment import child_environment
from headrace.deploy.process.event_loop import StandstillWatch
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.process.fork_server import early_or_new
from headrace.deploy.process.service_manager import service_manager
from headrace.deploy.process.stop_signals import StopSignals
from headrace.deploy.report.audit import audit
from headrace.deploy.report.evidence import contradictions, read_evidence
from headrace.deploy.report.progress import STALE_S, ProgressDisplay, ProgressView
from headrace.deploy.report.run_log import HURRIED_CLOSE_S, RunLog
from headrace.deploy.report.summary import RunFacts, Summary
from headrace.deploy.run.annexes import part
from headrace.deploy.run.fleet_file import told_as_starting
from headrace.deploy.run.goal import Goal, RunNumbers
from headrace.deploy.run.key_pairs import ensure_keys
from headrace.deploy.run.redis_view import Snapshot
from headrace.deploy.run.resume import EarlierRun
from headrace.deploy.run.run_dir import KEYS_FOLDER, RunDir, new_run_dir
from headrace.deploy.run.several_brokers import check_one_broker
from headrace.deploy.terminal.log_rotation import LogRotation
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.schemas.accounts.env_errors import INFO_LEFT_OUT
from headrace.schemas.basics.printable import one_line
from headrace.schemas.errors import ConfigError, ExitCode, HeadraceError, RunDirError
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.redis_url import without_password

log = logging.getLogger("headrace.supervisor")

TICK_S = 0.25
LOOK_S = 5.0
"""Seconds between two looks for what limits the pace."""
STANDSTILL_S = 3.0
"""Seconds without a new step after which a run counts as waiting. Numbers come about once a second."""


@dataclass
class RunOutcome:
    """The outcome of a run; filled in during the run."""

    began: float
    start: RunNumbers = field(default_factory=RunNumbers)
    at_goal: RunNumbers | None = None
    failure: HeadraceError | None = None
    seconds: float = 0.0
    bottleneck: Bottleneck | None = None
    """The limit of the pace that was found last."""
    errors_told: set[str] = field(default_factory=set)
    """Fingerprints of the failures of envs that were logged, or known at the start."""


def up(
    config: FleetConfig,
    *,
    as_json: bool = False,
    config_path: Path | None = None,
    origin: str = "defaults",
    resume: bool = False,
    record: Path | None = None,
) -> Summary:
    """Run a fleet until its goal, its timeout, a failure or a signal; drain it; return its summary.

    `origin` says in words where the configuration came from. `resume`: go on with the run in the run directory even if
    settings of its training differ. `record`: start a recorder, which writes to this folder. If `keys.dir` is RUN/keys,
    make the folder, and keys in it, if there are none.

    Raises only errors of the settings, the run directory and keys (`ConfigError`, `RunDirError`, `KeysError`); later
    errors are in the summary.
    """
    if platform.system() != "Linux":
        raise ConfigError(f"a fleet needs Linux, and this is {platform.system()}; on Windows use WSL 2")
    check_one_broker(config, "headrace up")
    path = Path(config.fleet.run_dir) if config.fleet.run_dir else new_run_dir(config.sampling.env)
    with RunDir(path) as run_dir, StopSignals() as signals, early_or_new(child_environment(1)) as fork_server:
        earlier = EarlierRun.of(run_dir)
        changes = earlier.check(config, resume=resume) if earlier is not None else []
        if (own := run_dir.path / KEYS_FOLDER) == Path(config.keys.dir):
            ensure_keys(own)
        set_up_logging(Identity(config.fleet.fleet_id, "supervisor"))
        part("warn_of_limits")(config, "fleet")
        log.info("checking env, modules and ports before anything starts")
        outcome = RunOutcome(began=time.monotonic())
        try:
            with told_as_starting(run_dir):
                check_before_start(config, run_dir, signals, fork_server)
        except HeadraceError as error:
            run_dir.remove_unless_used()
            outcome.failure, outcome.seconds = error, time.monotonic() - outcome.began
            return _summarise(config.fleet.fleet_id, run_dir, outcome)
        file = str(config_path.absolute()) if config_path else None
        with Fleet(config, run_dir, signals, file, fork_server, record) as fleet:
            set_up_logging(Identity(fleet.fleet_id, "supervisor"), file=run_dir.logs / "supervisor.log")
            service_manager().follow(fleet.loop)
            with (
                LogRotation(run_dir.logs),
                StandstillWatch(fleet.loop, run_dir.path),
                RunLog(config, fleet.fleet_id, run_dir.path) as run_log,
            ):
                facts = RunFacts(run_dir.path)
                try:
                    fleet.start()
                    outcome.start = fleet.numbers_before
                    outcome.errors_told.update(fleet.snapshot.errors)
                    _announce(fleet, origin, earlier, changes)
                    service_manager().ready()
                    with ProgressDisplay(sys.stderr if as_json else sys.stdout) as progress:
                        _run(fleet, outcome, progress, run_log)
                except HeadraceError as error:
                    outcome.failure = error
                except OSError as error:
                    fleet.supervisor.fail(error)
                outcome.seconds = time.monotonic() - outcome.began
                _drain(fleet, outcome, run_log)
                _log_rows(fleet, run_log, last=True)
                _warn_of_errors(fleet, outcome)
            outcome.failure = outcome.failure or fleet.supervisor.failure
            summary = _summarise(fleet.fleet_id, run_dir, outcome, fleet)
            facts.finish(summary, fleet.supervisor.services.values(), fleet.snapshot)
            return summary


def _announce(fleet: Fleet, origin: str, earlier: EarlierRun | None, changes: list[str]) -> None:
    """Log what was started, where the run goes on from, how to start further peers, and the goal."""
    if fleet.stop_asked:
        return
    endpoints = ", ".join(f"{name} {at}" for name, at in fleet.endpoints.items() if name != "dashboard")
    log.info(
        "headrace %s up: fleet %s in %s, %d %s on %s; %s; config: %s",
        version("headrace"),
        fleet.fleet_id,
        fleet.run_dir.path,
        fleet.config.fleet.workers,
        "worker" if fleet.config.fleet.workers == 1 else "workers",
        fleet.config.sampling.env,
        endpoints,
        origin,
    )
    if earlier is not None:
        before = fleet.numbers_before
        log.info("%s", earlier.in_words(before.steps, before.episodes, without_password(fleet.config.redis.url)))
        for change in changes:
            log.info("changed for this run: %s", change)
    if page := fleet.endpoints.get("dashboard"):
        log.info("dashboard: %s", page)
    for line in how_to_connect(fleet.config, fleet.endpoints, fleet.run_dir.path, fleet.fleet_id, fleet.snapshot.lease):
        log.info("%s", line)
    if fleet.config.broker.allow_insecure and not fleet.config.keys.dir:
        log.warning("this fleet serves all who reach it by TCP without keys, since broker.allow_insecure = true")
    log.info("it runs %s", Goal.of(fleet.config.fleet).in_words(fleet.numbers_before))


def _log_rows(fleet: Fleet, run_log: RunLog, *, last: bool = False) -> None:
    restarts, learner_rows = fleet.supervisor.restarts(), fleet.take_learner_rows()
    run_log.observe(fleet.snapshot, restarts, learner_rows, fleet.evaluations.take_new(), last=last)


def _run(fleet: Fleet, outcome: RunOutcome, progress: ProgressDisplay, run_log: RunLog) -> None:
    """Turn the loop until there is a reason to stop. Raises the failure or the timeout, if that is the reason."""
    goal, standstill, look_at = Goal.of(fleet.config.fleet), Standstill(outcome.start.steps), 0.0
    shown_from = replace(outcome.start, mean_return=None)
    limit: Bottleneck | None = None
    withheld = ""
    while not fleet.stop_asked:
        fleet.loop.turn(TICK_S)
        _log_rows(fleet, run_log)
        _warn_of_errors(fleet, outcome)
        if fleet.supervisor.failure is not None:
            raise fleet.supervisor.failure
        seconds, now = time.monotonic() - outcome.began, fleet.numbers()
        fleet.record.note_numbers(now.steps, now.best_return)
        fleet.record.note_redis(fleet.redis_age_s if fleet.redis_age_s > STALE_S else 0.0)
        reached = goal.reached(now, outcome.start)
        if not withheld and (withheld := goal.withheld(now, outcome.start)):
            log.warning("%s; `headrace why %s` counts failures", withheld, fleet.run_dir.path)
        standstill.note(now, seconds)
        if shown_from.mean_return is None and now.steps > outcome.start.steps:
            shown_from = replace(shown_from, mean_return=now.best_return)
        if seconds >= look_at:
            look_at, facts = seconds + LOOK_S, fleet.facts()
            limit = find_bottleneck(facts, find(facts))
            outcome.bottleneck = limit or outcome.bottleneck
        waits = progress.is_due and standstill.lasts and not reached
        view = ProgressView(
            seconds,
            now,
            goal,
            start=shown_from,
            snapshot=fleet.snapshot,
            restarts=fleet.supervisor.restarts(),
            redis_age_s=fleet.redis_age_s,
            waiting=awaited(fleet.facts()) if waits else "",
            bottleneck=limit.sentence if limit is not None else "",
            evaluation=fleet.evaluations.newest,
        )
        progress.show(view, last=reached)
        service_manager().status(view.in_one_line)
        if reached:
            outcome.at_goal = now
            log.info("goal reached after %.1f s (%s); draining", seconds, _where(now))
            return
        if goal.has_done_its_time(seconds, now, outcome.start):
            outcome.at_goal = now
            log.info("%.1f s are over (%s); draining", seconds, _where(now))
            return
        if goal.late(seconds):
            waiting = awaited(fleet.facts()) if standstill.lasts else ""
            advice = "raise --timeout-s or lower the goal"
            if waiting:
                advice = f"it stood still, waiting for {waiting}; if that only takes long, raise --timeout-s"
            within = f"within {goal.timeout_s or seconds:g} s ({_where(now)})"
            raise FleetError(f"the goal was not reached {within}; {advice}", ExitCode.TIMEOUT)
    log.info("draining after a signal; another one stops at once")


def _warn_of_errors(fleet: Fleet, outcome: RunOutcome) -> None:
    """Log each kind of failure of an env once, when its first one is known."""
    errors, path = fleet.snapshot.errors, fleet.run_dir.path
    for name in errors.keys() - outcome.errors_told:
        outcome.errors_told.add(name)
        row = errors[name]
        if row.kind == INFO_LEFT_OUT:
            log.warning("%s; `headrace why %s` counts them", one_line(row.message), path)
            continue
        text = one_line(": ".join(part for part in (row.exception or row.kind, row.message) if part))
        where = f" at {row.where}" if row.where else ""
        log.warning("an env failed: %s%s; `headrace why %s` counts such failures", text, where, path)


class Standstill:
    """Notices when a run takes no step, from its start on."""

    def __init__(self, steps: int) -> None:
        self._start = self._steps = steps
        self._moved_at = -math.inf

    def note(self, now: RunNumbers, seconds: float) -> None:
        """Take the run's numbers at `seconds` after its start. Log its first steps."""
        if now.steps > self._steps:
            if self._steps == self._start:
                log.info("first env steps %.1f s after the start", seconds)
            self._steps, self._moved_at = now.steps, time.monotonic()

    @property
    def lasts(self) -> bool:
        """Return whether no new step was reported for `STANDSTILL_S` seconds."""
        return time.monotonic() - self._moved_at > STANDSTILL_S


def _where(now: RunNumbers) -> str:
    mean = "no episode has ended" if now.mean_return is None else f"mean return {now.show_mean_return()}"
    return f"{now.steps:,} steps, {mean}"


def _drain(fleet: Fleet, outcome: RunOutcome, run_log: RunLog) -> None:
    service_manager().stopping()
    try:
        fleet.drain(at_goal=outcome.at_goal is not None)
    except FleetError as error:
        outcome.failure = outcome.failure or error
        run_log.close_s = HURRIED_CLOSE_S
    except (OSError, RunDirError) as error:
        fleet.supervisor.fail(error)


def _summarise(fleet_id: str, run_dir: RunDir, outcome: RunOutcome, fleet: Fleet | None = None) -> Summary:
    """Summarise a run; without `fleet` one that has started nothing."""
    snapshot = fleet.snapshot if fleet is not None and fleet.snapshot.fleet_id else None
    return Summary(
        fleet_id=fleet_id,
        run_dir=str(run_dir.path),
        seconds=outcome.seconds,
        start=outcome.start,
        end=fleet.numbers() if fleet is not None else outcome.start,
        at_goal=outcome.at_goal,
        restarts=fleet.supervisor.restarts() if fleet is not None else {},
        weights_seq=int(snapshot.gauges.get("weights_seq", 0)) if snapshot else 0,
        ledger=snapshot.fleet if snapshot else None,
        failure=outcome.failure,
        problems=_problems(fleet, snapshot) if fleet is not None and snapshot else (),
        bottleneck=outcome.bottleneck.in_words() if outcome.bottleneck is not None else "",
    )


def _problems(fleet: Fleet, snapshot: Snapshot) -> list[str]:
    """Return the audit's problems. A fleet that ended before its broker's first report has no ledger to audit."""
    try:
        evidence = read_evidence(fleet.run_dir.path, fleet.fleet_id)
    except (OSError, RunDirError) as error:
        return [f"the books are not compared with the files of the run: {error}"]
    if snapshot.reported_unix_s is None:
        return [*snapshot.garbage, *contradictions(evidence, snapshot)]
    return audit(snapshot, evidence)
