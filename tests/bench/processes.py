"""The processes of one bench. They are forked, found by their endpoints, and ended with the bench."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from headrace.broker.files.state_file import Endpoints, read_broker_file
from headrace.broker.process import Broker, run_broker
from headrace.broker.reports.fleet_reports import FleetReports
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.settings.config import FleetConfig

FLEET_ID = "bench"
FORKED = multiprocessing.get_context("forkserver")
"""Processes are forked from one that has imported torch and what they run: each import would take seconds."""
FORKED.set_forkserver_preload(["torch", "gymnasium", "headrace.broker.process", "headrace.workers.fleet.worker"])
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of every process, as `headrace up` sets it. BLAS threads of two samplers would fight for two cores."""

_START_S = 60.0
_STOP_S = 15.0


class Processes:
    """Child processes that end with the `with` block, the newest first."""

    def __init__(self, enter: Callable[[], None] | None = None) -> None:
        """`enter` is called first in each process."""
        os.environ.update(ONE_THREAD)
        self._enter = enter
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-bench-")
        self._all: list[Any] = []

    @property
    def folder(self) -> Path:
        """A folder for run directories and recorders."""
        return Path(self._folder.name)

    def start(self, target: Callable[..., None], *args: Any) -> int:
        """Run `target(*args)` in a process of its own; return its pid."""
        process = FORKED.Process(target=_quietly, args=(self._enter, target, *args), daemon=True)
        process.start()
        self._all.append(process)
        return int(process.pid)

    def start_broker(
        self,
        config: FleetConfig,
        redis_url: str | None = None,
        *,
        run_dir: Path | None = None,
        note: Callable[[BrokerCore, float | None], None] | None = None,
    ) -> tuple[int, Endpoints]:
        """Start a broker and wait until it serves; return (pid, endpoints).

        `run_dir`: that of an earlier broker, from which this one goes on. `note` is called in the broker's loop: in
        each turn with None, and after each report with the seconds that the loop stood still for it.
        """
        if run_dir is None:
            run_dir = self.folder / f"broker-{len(self._all)}"
            run_dir.mkdir()
        pid = self.start(_serve, config, run_dir, redis_url, note)
        deadline = time.monotonic() + _START_S
        while (written := read_broker_file(run_dir)) is None or written.pid != pid:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no broker in {run_dir} after {_START_S} s")
            self._all[-1].join(0.02)
        return pid, written.endpoints

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._all):
            process.terminate()
            process.join(_STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def until_terminated() -> threading.Event:
    """Return an event that SIGTERM sets."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    return stopping


def _quietly(enter: Callable[[], None] | None, target: Callable[..., None], *args: Any) -> None:
    logging.basicConfig(level=logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if enter is not None:
        enter()
    target(*args)


def _serve(
    config: FleetConfig,
    run_dir: Path,
    redis_url: str | None,
    note: Callable[[BrokerCore, float | None], None] | None,
) -> None:
    if note is not None:
        _note_turns(note)
    run_broker(config, fleet_id=FLEET_ID, run_dir=run_dir, redis_url=redis_url)


def _note_turns(note: Callable[[BrokerCore, float | None], None]) -> None:
    """Let this process's broker call `note`, as `Processes.start_broker` says."""
    step, report = Broker.step, FleetReports.report

    def noted_step(broker: Broker) -> None:
        step(broker)
        note(broker.core, None)

    def noted_report(reports: FleetReports, now: float, ended_unix_s: float | None = None) -> None:
        began = time.thread_time()
        report(reports, now, ended_unix_s)
        note(reports.metrics.core, time.thread_time() - began)

    Broker.step, FleetReports.report = noted_step, noted_report  # type: ignore[method-assign]
