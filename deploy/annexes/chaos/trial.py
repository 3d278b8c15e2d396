"""One trial: a real fleet, the faults of a plan, and the drain. It judges nothing; `checks.py` does."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.deploy.annexes.chaos import faults, truth
from headrace.deploy.annexes.chaos.faults import SkippedError, Undo
from headrace.deploy.annexes.chaos.processes import FleetProcesses, Folders, OwnProcess
from headrace.deploy.annexes.chaos.recorder import RECORD
from headrace.deploy.annexes.chaos.schedule import ELSEWHERE, Event, Kind, Plan
from headrace.deploy.process.child import describe_end
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.process.recorders import Life, recorders_in
from headrace.deploy.process.stop_signals import StopSignals
from headrace.schemas.accounts.recorder import Reading, read_recorder
from headrace.schemas.basics.bounds import MOST_COUNT
from headrace.schemas.basics.printable import printable
from headrace.schemas.errors import ExitCode, UnreachableError

START_S = 180.0
TURN_S = 0.05
PATIENCE_S = 10.0
"""Seconds that an event waits for its targets to run."""
_SAY_S = 10.0
_DRAIN_S = 120.0
_MOST_ENDS = 20
"""Processes that ended by themselves, after which the trial gives up: they would only end again."""

Say = Callable[[str], None]


@dataclass
class Injected:
    """An event as it happened. Times are on the monotonic clock, s."""

    event: Event
    at: float
    skipped: str = ""
    """The reason for which it was not injected; "" if it was."""
    over: float = 0.0
    """Time at which it was undone."""
    cut: dict[Life, int] = field(default_factory=dict)
    """The newest batch of each life when the fault was over. A later one has steps that were taken since."""
    recovery_s: float | None = None
    """Seconds from then to the next new step at the learner; filled in by `checks.py`."""
    awaited: set[int] = field(default_factory=set)
    """Slots whose next step is not yet at the learner. Without any, a step of any slot will do."""


@dataclass
class TrialResult:
    """The result of a trial, to be judged together with its files."""

    plan: Plan
    folders: Folders
    num_envs: int
    began: float = 0.0
    """Time of the first step at the learner, on the monotonic clock."""
    injected: list[Injected] = field(default_factory=list)
    ended_early: list[str] = field(default_factory=list)
    """Sentences on processes that ended by themselves."""
    up_returncode: int = 0
    summary: dict[str, Any] = field(default_factory=dict)
    living: set[Life] = field(default_factory=set)
    """Lives that ended with the drain. No step of theirs may be missing."""
    cut_short: bool = False
    """True after a signal: later events did not happen."""
    lives: dict[str, int] = field(default_factory=dict)
    """Lives of each process that the trial itself started."""


class Trial:
    """Runs one plan in `folders`. Use it from the main thread."""

    def __init__(self, plan: Plan, folders: Folders, num_envs: int, say: Say) -> None:
        self._plan, self._folders, self._say = plan, folders, say
        self.outcome = TrialResult(plan, folders, num_envs)
        self._processes = FleetProcesses(folders)
        self._undo: list[tuple[float, Injected, Undo]] = []

    def run(self) -> TrialResult:
        """Start the fleet, inject every event at its time, drain. Raises `HeadraceError` where no fleet starts."""
        with StopSignals() as signals:
            try:
                self._start(signals)
                self._inject_all(signals)
                self._undo_all()
                self._drain()
            finally:
                self._undo_all()
                self._processes.close()
        return self.outcome

    def _start(self, signals: StopSignals) -> None:
        self._say(f"starting the fleet in {self._folders.fleet}")
        self._processes.up.start()
        self._wait(lambda: bool(self._processes.address("learner")), "the broker to serve", signals)
        self._processes.learner.start()
        self._processes.elsewhere.start()
        self._wait(self._all_deliver, "every worker's first batch at the learner", signals)
        self.outcome.began = time.monotonic()

    def _wait(self, done: Callable[[], bool], what: str, signals: StopSignals) -> None:
        began, said = time.monotonic(), 0.0
        while not done():
            waited_s = time.monotonic() - began
            up = self._processes.up.process
            if up is not None and (returncode := up.poll()) is not None:
                sentence = self._processes.up.last_line().removeprefix("error: ")
                raise FleetError(f"headrace up: {sentence}", _exit_code(returncode))
            for own in (self._processes.learner, self._processes.elsewhere):
                own.tend() if own.lives else None
            if signals.count or waited_s > START_S:
                raise UnreachableError("fleet", f"{self._folders.fleet} ({what})", waited_s)
            if waited_s - said > _SAY_S:
                said = waited_s
                self._say(f"waiting for {what} ({waited_s:.0f} s of at most {START_S:.0f} s)")
            time.sleep(TURN_S)

    def _all_deliver(self) -> bool:
        """Return whether the record has a batch, and each worker has cut one."""
        record = self._folders.record / RECORD
        if not record.exists() or not record.stat().st_size:
            return False
        return len(self._newest_batches(at_least=1)) > self._plan.workers

    def _readings(self) -> dict[Life, Reading]:
        """Return the recorders that are there."""
        found = {}
        with contextlib.suppress(OSError):
            for life, path in recorders_in(self._folders.fleet / "recorders"):
                if (reading := read_recorder(path)) is not None:
                    found[life] = reading
        return found

    def _newest_batches(self, at_least: int = 0) -> dict[Life, int]:
        """Return the newest batch of each life whose recorder is there."""
        batches = {life: reading.totals.seq for life, reading in self._readings().items()}
        return {life: seq for life, seq in batches.items() if seq >= at_least}

    # -- the schedule -------------------------------------------------------------------------------------------------

    def _inject_all(self, signals: StopSignals) -> None:
        due = list(self._plan.events)
        while (now_s := time.monotonic() - self.outcome.began) < self._plan.seconds:
            if signals.count:
                self.outcome.cut_short = True
                self._say("a signal: no further events; draining")
                return
            for event in [event for event in due if event.at_s <= now_s]:
                if self._inject(event, may_wait=now_s < event.at_s + PATIENCE_S):
                    due.remove(event)
            for undo in [entry for entry in self._undo if entry[0] <= time.monotonic()]:
                self._finish(undo)
            self._tend()
            time.sleep(TURN_S)

    def _inject(self, event: Event, *, may_wait: bool) -> bool:
        """Inject an event, or note why it is skipped. Return False to retry: a target may be between two lives."""
        injected = Injected(event, time.monotonic())
        try:
            undo = faults.inject(event, self._processes)
            self._undo.append((injected.at + event.seconds, injected, undo))
        except SkippedError as error:
            if may_wait:
                return False
            injected.skipped = str(error)
        self.outcome.injected.append(injected)
        number = f"{len(self.outcome.injected)}/{len(self._plan.events)}"
        self._say(f"{number:>9} {event.in_words()}" + (f"  skipped: {injected.skipped}" if injected.skipped else ""))
        if not event.seconds and not injected.skipped:
            self._finish(self._undo[-1])
        return True

    def _finish(self, entry: tuple[float, Injected, Undo]) -> None:
        self._undo.remove(entry)
        _, injected, undo = entry
        undo()
        injected.over = time.monotonic()
        injected.cut = self._newest_batches()
        injected.awaited = self._plan.slots_hit_by(injected.event)
        if injected.event.kind is Kind.KILL:
            # A batch that a dying worker still cut is no recovery. Only a batch of the slot's next life is.
            dead = (life for life in injected.cut if life[0] in injected.awaited)
            injected.cut |= dict.fromkeys(dead, MOST_COUNT)

    def _undo_all(self) -> None:
        for entry in list(self._undo):
            self._finish(entry)
        truth.take_back_order(self._folders.truth)

    def _tend(self) -> None:
        """Restart processes that have ended, and note ends that the schedule does not explain."""
        for own in self._processes.own:
            returncode = own.tend()
            if returncode is None or not self._is_unexpected(own, returncode):
                continue
            last = self.outcome.injected[-1].event.in_words().strip() if self.outcome.injected else "none"
            end = f"{own.name} ended by itself with {describe_end(returncode)}: {printable(own.last_line()[:300])}"
            self.outcome.ended_early.append(f"{end}; the event before it: {last}")
            self._say(f"          {end}")
            if len(self.outcome.ended_early) >= _MOST_ENDS:
                raise FleetError(f"{own.name}: {self.outcome.ended_early[-1]}", _exit_code(returncode))

    def _is_unexpected(self, own: OwnProcess, returncode: int) -> bool:
        """Return whether no event of the schedule explains this end."""
        if returncode == -signal.SIGKILL:
            return False  # the schedule sent it: nothing else sends SIGKILL
        # A worker that was stopped for longer than its lease finds its slot taken, and is fenced.
        return own is not self._processes.elsewhere or returncode != ExitCode.FENCED

    # -- the end ------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Stop everything in order: the worker from elsewhere, the fleet, and last the learner that settles."""
        self._say("draining")
        self._settle()
        self.outcome.living = set(self._newest_batches(at_least=0)) & self._running_lives()
        self._processes.elsewhere.stop()
        self.outcome.up_returncode = self._processes.up.stop(_DRAIN_S)
        self.outcome.summary = self._processes.summary()
        self._processes.learner.stop()
        self.outcome.lives = {own.name: own.lives for own in self._processes.own}

    def _settle(self) -> None:
        """Wait until all processes run again and each worker has cut a batch, so that the drain meets a whole fleet."""
        deadline = time.monotonic() + START_S

        def whole() -> bool:
            names = [f"worker-{slot}" for slot in range(self._plan.workers)]
            if not all(self._processes.pid(name) for name in ("supervisor", "learner", ELSEWHERE, "broker", *names)):
                return False
            return len(self._newest_batches(at_least=1).keys() & self._running_lives()) > self._plan.workers

        steady = 0
        while steady * TURN_S < 2.0 and time.monotonic() < deadline:
            self._tend()
            steady = steady + 1 if whole() else 0
            time.sleep(TURN_S)

    def _running_lives(self) -> set[Life]:
        pids = {process.pid for process in self._processes.page().processes} | {self._processes.elsewhere.pid}
        return {life for life, reading in self._readings().items() if reading.pid in pids}


def _exit_code(returncode: int) -> ExitCode:
    try:
        return ExitCode(returncode)
    except ValueError:
        return ExitCode.FAILURE
