"""Places that name the addresses of a fleet, and the wait until one does."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.run_files import endpoint_in, read_object, run_state
from headrace.schemas.basics.stop_event import check_stop
from headrace.schemas.errors import HeadraceError, RunDirError, absolute

log = logging.getLogger("headrace.fleet")

LOOK_S = 0.2
SAY_WAITING_S = 10.0


class AddressSource(Protocol):
    """A place that names the addresses of a fleet: its run directory, or its rendezvous."""

    @property
    def problem(self) -> str:
        """Return a text on why it names no address for the role that was last asked for."""

    def find(self, role: str) -> str:
        """Return the address for peers of `role` now; "" while there is none."""

    def stopped(self) -> HeadraceError | None:
        """Return an error that says so, if the fleet has stopped; None if it runs, or nothing is known."""

    @property
    def at_goal(self) -> bool:
        """Return whether a fleet that has stopped is done: it has reached its goal, so no start of it is due."""


class RunDirAddresses:
    """The addresses in the run directory `path` of a fleet on this machine.

    With `running`, those of a run that has stopped or just begins do not count.
    """

    def __init__(self, path: Path, *, running: bool = False) -> None:
        self.path = absolute(path)  # a program may change its working directory
        self._running = running

    @property
    def problem(self) -> str:
        """Return a text on why there is no address, with what to do."""
        begin = f"the run in {self.path} has no broker yet: start it with `headrace up --run-dir {to_paste(self.path)}`"
        return str(self.stopped() or begin)

    def find(self, role: str) -> str:
        """Return the address for peers of `role` now; "" while there is none."""
        if self._running and run_state(self.path) in ("stopped", "starting"):
            return ""
        return endpoint_in(self.path, role)

    def stopped(self) -> HeadraceError | None:
        """Return an error that says so, if the run has stopped."""
        if not (end := how_it_ended(self.path)):
            return None
        sentence = f"{end}; go on with `headrace up --resume {to_paste(self.path)}`"
        return RunDirError(str(self.path), end, sentence=sentence)

    @property
    def at_goal(self) -> bool:
        """Return whether the run has reached its goal."""
        return read_object(self.path / "fleet.json").get("at_goal") is True


def how_it_ended(run_dir: Path) -> str:
    """Return how and when the fleet in `run_dir` ended, and after how many steps; "" if it has not."""
    told = read_object(run_dir / "fleet.json")
    if told.get("state") != "stopped":
        return ""
    ended, steps = told.get("ended"), told.get("env_steps")
    at = time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(ended)) if isinstance(ended, float) else ""
    after = f" after {steps:,} env steps" if isinstance(steps, int) else ""
    how = "reached its goal" if told.get("at_goal") is True else "was stopped"
    return f"the fleet in {run_dir} {how}{at}{after}"


class FirstOf:
    """The places of several brokers of one fleet. Its address is that of the first one that has any."""

    def __init__(self, sources: Sequence[AddressSource]) -> None:
        self._sources = sources

    @property
    def problem(self) -> str:
        """Return a text on why none of them names an address."""
        return "; ".join(source.problem for source in self._sources)

    def find(self, role: str) -> str:
        """Return the address of the first broker that has one for peers of `role`; "" while there is none."""
        return next((address for source in self._sources if (address := source.find(role))), "")

    def stopped(self) -> HeadraceError | None:
        """Return an error that says so, if all have stopped."""
        errors = [source.stopped() for source in self._sources]
        return errors[0] if all(errors) else None

    @property
    def at_goal(self) -> bool:
        """Return whether all are done."""
        return all(source.at_goal for source in self._sources)


def await_address(
    source: AddressSource, role: str, timeout_s: float, pause: Callable[[float], object] = time.sleep
) -> str:
    """Return the address for peers of `role`, once `source` names one; "" after `timeout_s`.

    Logs every ten seconds what it waits for. `pause` sleeps for a time in seconds; where it returns true, the wait
    ends. Raises `StoppedError` after a stop signal.
    """
    began, say_at = time.monotonic(), 0.0
    while not (address := source.find(role)):
        check_stop()
        waited_s = time.monotonic() - began
        if waited_s >= timeout_s:
            return ""
        if waited_s >= say_at and source.problem:
            say_at = waited_s + SAY_WAITING_S
            most = "" if math.isinf(timeout_s) else f" of at most {timeout_s:.0f} s"
            log.warning("%s; waiting for it (%.0f s%s)", source.problem, waited_s, most)
        if pause(LOOK_S):
            return ""
    return address
