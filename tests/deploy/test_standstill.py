"""While nothing moves, the terminal of `headrace up` names the process or peer that stands still."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headrace.broker.redis.client import connect
from headrace.deploy.monitoring.facts import FactsReader
from headrace.deploy.monitoring.findings import find
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.slow

_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

LEARNER = """
import signal
import sys
import time
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.workers.modules import actor_critic

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))  # a long update
with EpisodeStream.of(sys.argv[1]) as stream, WeightPublisher.of(sys.argv[1]) as weights:
    module = actor_critic(stream.spaces())
    weights.publish(module.state_dict())
    for batch in stream:
        weights.publish(module.state_dict())
"""


class Screen:
    """A terminal on which a fleet shows its table, twice a second. It remembers all that was ever shown."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        self._shown = ""
        self._from = 0
        self._master, slave = os.openpty()
        command = [sys.executable, "-m", "headrace.deploy", "up", "--run-dir", str(run_dir), "--workers", "1"]
        self.process = subprocess.Popen(
            [*command, "--set", "learner.enabled=false", "--set", "broker.lease_s=90", *arguments],
            stdout=slave,
            stderr=slave,
            env={**os.environ, "COLUMNS": "500", "TERM": "xterm"},
        )
        os.close(slave)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError):  # no process has the terminal any more
            while part := os.read(self._master, 1 << 16):
                self._shown += part.decode(errors="replace")

    def shows(self, pattern: str) -> re.Match[str]:
        """The first match of `pattern` since `forget`, once it is shown."""

        def look() -> re.Match[str] | None:
            assert self.process.poll() is None, self._shown[-4000:]
            return re.search(pattern, self.text())

        try:
            found = wait_until(look, f"{pattern!r} on the terminal", pause_s=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.text()[-2000:]}") from error
        assert found is not None
        return found

    def text(self) -> str:
        """Return the text that was shown since `forget`."""
        return _STYLE.sub("", self._shown[self._from :])

    def forget(self) -> None:
        """Look only at what is shown from now on."""
        self._from = len(self._shown)

    def page(self) -> FleetFile:
        return read_fleet_file(self.run_dir / "fleet.json")

    def pid(self, role: str) -> int:
        """The process of this role that runs."""
        return next(process.pid for process in self.page().processes if process.role == role)

    def close(self) -> None:
        """Kill the fleet, which may stand still for ever."""
        pids = [p.pid for p in self.page().processes] if (self.run_dir / "fleet.json").exists() else []
        self.process.kill()
        self.process.wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)), "the end of all processes")
        self._thread.join()
        os.close(self._master)


def found(run_dir: Path) -> set[str]:
    """Return the kinds of what is wrong."""
    with FactsReader(run_dir) as reader:
        return {one.kind for one in find(reader.read())}


@contextmanager
def screen(run_dir: Path, *arguments: str) -> Iterator[Screen]:
    shown = Screen(run_dir, *arguments)
    try:
        yield shown
    finally:
        shown.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placement", ["inline", "process", "remote"])
@pytest.mark.parametrize("call", ["step", "reset"])
def test_the_terminal_names_the_worker_and_the_call_of_an_env_that_does_not_answer(
    tmp_path: Path, placement: str, call: str
) -> None:
    lane = 0 if placement == "remote" else 1  # on a host, a lane steps whatever the others do
    hangs = f'sampling.env_config={{"lane": {lane}, "faults": {{"{call}": "hangs"}}}}'
    settings = (f"sampling.env_placement={placement}", "worker.random_actions_before_weights=true", hangs)
    arguments = [part for setting in settings for part in ("--set", setting)]
    env = ("--env", "support.envs.troubled:Troubled", "--num-envs", str(lane + 1), "--no-check-env")
    hosts = ("--env-hosts", "1") if placement == "remote" else ()
    sentence = rf"env {lane} has been in {call} for \d+ s \(env_{call}_timeout_s = \d+\)"
    with screen(tmp_path / "run", *env, *hosts, *arguments) as fleet:
        told = fleet.shows(rf"waiting for +worker-0 \(pid (\d+)\): {sentence}")
        assert int(told[1]) == fleet.pid("worker")


@pytest.mark.thorough
def test_the_terminal_names_each_stall_and_not_weights_that_workers_have(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with screen(run_dir, "--env", "CartPole-v1", "--num-envs", "2") as fleet:
        fleet.shows(r"waiting for +first weights from a learner at ipc:///\S+/learner; no learner is connected")
        with subprocess.Popen([sys.executable, "-c", LEARNER, str(run_dir)]) as learner:
            try:
                fleet.shows(r"weights +1/[1-9]")
                for role in ("worker", "broker"):
                    pid = fleet.pid(role)
                    os.kill(pid, signal.SIGSTOP)
                    fleet.shows(rf"waiting for +{role}(-0)? \(pid {pid}\), which is stopped \(kill -CONT {pid}\)")
                    os.kill(pid, signal.SIGCONT)
                fleet.forget()
                fleet.shows(r"env steps +[\d,]+ \([1-9][\d,]*/s\)")
                learner.send_signal(signal.SIGUSR1)
                mine = rf"waiting for +the learner python \(pid {learner.pid} on [^)]+\)"  # python -c has no script
                told = mine + " to commit what it holds; it holds the lease "
                fleet.shows(told + r"\(epoch 1\) and has not committed for \d+ s")
                wait_until(lambda: found(run_dir) == {"learner_slow"}, "a finding", pause_s=0.5)

                page, broker = fleet.page(), fleet.pid("broker")
                os.kill(broker, signal.SIGSTOP)
                with connect(page.redis_url, TIMEOUT_S) as client:
                    client.flushall()
                fleet.forget()
                os.kill(broker, signal.SIGKILL)
                fleet.shows(
                    r"waiting for +a learner at ipc:///\S+/learner to commit what it holds; no learner is connected"
                )
                assert "first weights" not in fleet.text(), "the worker has weights"
                wait_until(lambda: found(run_dir) == {"no_learner"}, "a finding", pause_s=0.5)
            finally:
                learner.kill()
