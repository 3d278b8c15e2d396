"""A hundred clients at a worker of a real fleet: 50 behave, 20 repeat themselves, 10 are slow, and 20 are killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self

from headrace.deploy.run.fleet_file import read_fleet_file
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

PROGRAM = "support.fleets.crowd_of_clients"
STEADY = (("plain", 25), ("plain", 25), ("repeating", 10), ("repeating", 10), ("slow", 10))
DOOMED, OF_ONE = 5, 4
"""Processes that are killed, and come again; clients of each."""
PLACES = 160
"""More than clients: an episode whose client was killed keeps its place until the lease ends."""
LEASE_S = 4.0
SETTINGS = (f"serving.lease_s={LEASE_S}", "serving.http_port=0", "learner.steps_per_update=2048")


class Storm:
    """The fleet, and the clients, which play from the beginning. Nothing of it outlives the block."""

    def __init__(self, run_dir: Path, *, timeout_s: float = 240.0) -> None:
        sets = [part for setting in SETTINGS for part in ("--set", setting)]
        arguments = ["--env", "CartPole-v1", "--workers", "1", "--num-envs", str(PLACES), "--serve", *sets]
        self.fleet = RunningFleet(run_dir, *arguments, "--timeout-s", str(timeout_s))
        self._rng = random.Random(0)
        self._run_dir = run_dir
        self._steady: list[subprocess.Popen[str]] = []
        self._doomed: list[subprocess.Popen[str]] = []
        self.killed = 0
        """Clients."""

    def begin(self) -> None:
        """Start all clients; returns once every process of them has a session."""
        self.fleet.wait_until(lambda: self._endpoint("http-0") and self._health(), "the worker serves")
        for kind, count in STEADY:
            self._steady.append(self._start(kind, count))
        for _ in range(DOOMED):
            self._doomed.append(self._start("plain", OF_ONE))
        clients = sum(count for _, count in STEADY) + DOOMED * OF_ONE
        self.fleet.wait_until(lambda: self._health()["sessions"] >= clients, f"{clients} sessions")

    def kill_one(self) -> None:
        """A process of clients at random, at whatever it does; another one comes in its place."""
        doomed = self._doomed.pop(self._rng.randrange(DOOMED))
        doomed.kill()
        doomed.communicate()
        self.killed += OF_ONE
        self._doomed.append(self._start("plain", OF_ONE))

    def episodes(self) -> int:
        """Finished ones that the broker has heard of."""
        snapshot = self.fleet.snapshot()
        return snapshot.totals.get("episodes_total", 0) if snapshot else 0

    def episodes_lost(self) -> int:
        """Those that the worker gave up when their client was gone; steps shipped before that are not discarded."""
        logs = [path.read_text() for path in (self._run_dir / "logs").glob("worker-*.log*")]
        return sum(log.count("is gone: client_lost") for log in logs)

    def sizes(self) -> dict[str, int]:
        """What the worker holds: resident KiB, threads, open files, and the tables of its sessions."""
        worker = Path(f"/proc/{self.fleet.pid('worker')}")
        status = dict(line.split(":", 1) for line in (worker / "status").read_text().splitlines())
        files = len(list((worker / "fd").iterdir()))
        tables = {name: self._health()[name] for name in ("sessions", "episodes", "remembered")}
        return {"rss_kib": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"]), "files": files, **tables}

    def end_clients(self) -> list[dict[str, Any]]:
        """Kill the doomed once more, and let the others finish; what each process of those says."""
        while self._doomed:
            doomed = self._doomed.pop()
            doomed.kill()
            doomed.communicate()
            self.killed += OF_ONE
        for process in self._steady:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        return [json.loads(process.communicate(timeout=TIMEOUT_S)[0]) for process in self._steady]

    def _start(self, kind: str, count: int) -> subprocess.Popen[str]:
        where = [self._endpoint("clients-0"), self._endpoint("http-0"), str(self._rng.random())]
        command = [sys.executable, "-m", PROGRAM, kind, str(count), *where]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _endpoint(self, name: str) -> str:
        path = self._run_dir / "fleet.json"
        return read_fleet_file(path).endpoints.get(name, "") if path.exists() else ""

    def _health(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self._endpoint('http-0')}/v1/health", timeout=TIMEOUT_S) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except OSError:
            return {}

    def __enter__(self) -> Self:
        self.fleet.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._steady, *self._doomed):
            if process.poll() is None:
                process.kill()
                process.communicate()
        self.fleet.__exit__()
