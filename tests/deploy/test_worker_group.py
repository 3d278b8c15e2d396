"""`headrace worker --count`: workers of one machine for a fleet elsewhere, in any order of start and death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from headrace.deploy.fleet.worker_group import WorkerGroup
from headrace.deploy.process.exit_record import ExitRecord
from headrace.deploy.process.recorders import recorders_in
from headrace.deploy.process.stop_signals import StopSignals
from headrace.deploy.run.joining import Joined
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.recorder import Reading, read_recorder
from headrace.schemas.errors import ExitCode
from headrace.schemas.settings.config_loading import build_config
from support.fleets.running_fleet import RunningFleet
from support.ports import by_tcp, free_port
from support.runners.process_driver import is_running
from support.waiting import TIMEOUT_S, wait_until

SETTINGS = ("--env", "CartPole-v1", "--num-envs", "4", "--set", "broker.lease_s=3")
RANDOM = ("--set", "worker.random_actions_before_weights=true")


class Group:
    """A real group in a process of its own."""

    def __init__(self, folder: Path, words: IO[bytes], *options: str) -> None:
        self.scratch, self._words = folder / "scratch", folder / "words"
        command = [sys.executable, "-m", "headrace.deploy", "worker", "--scratch-dir", str(self.scratch), *options]
        self.process = subprocess.Popen(command, cwd=folder, stdout=words, stderr=words)

    def said(self) -> str:
        return self._words.read_text()

    def lives(self) -> dict[tuple[int, int], Reading]:
        """Return what stands in each recorder that is there, by (slot, incarnation)."""
        paths = [found for folder in self.scratch.glob("*/recorders") for found in recorders_in(folder)]
        readings = {life: read_recorder(path) for life, path in paths}
        return {life: reading for life, reading in readings.items() if reading is not None}

    def wait_until(self, condition: object, what: str) -> None:
        def met() -> bool:
            assert self.process.poll() is None, self.said()
            return bool(condition())  # type: ignore[operator]

        wait_until(met, what)


@contextmanager
def group(folder: Path, *options: str) -> Iterator[Group]:
    with (folder / "words").open("ab") as words:
        started = Group(folder, words, *options)
        try:
            yield started
        finally:
            started.process.terminate()
            started.process.wait(60)


def torch_at(pid: int) -> str:
    """Return the address of torch in a process. The kernel chooses it at random for each import."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(line.split("-")[0] for line in maps if "libtorch_cpu" in line)


@pytest.mark.thorough
@pytest.mark.chaos
def test_the_books_have_the_steps_of_killed_workers_and_of_a_killed_group(tmp_path: Path) -> None:
    """The group starts before its fleet. A worker is killed, then the whole group, and a second group replaces it."""
    run, meet = tmp_path / "run", tmp_path / "meet" / "fleet.json"
    options = ("--rendezvous", str(meet), "--count", "2", *SETTINGS)
    with group(tmp_path, *options) as first:
        first.wait_until(lambda: f"{meet} cannot be read" in first.said(), "the sentence that it waits")
        with RunningFleet(run, "--workers", "0", *SETTINGS, "--set", f"fleet.rendezvous={meet}") as fleet:
            fleet.wait_until(lambda: fleet.steps() > 2000, "steps")
            first.wait_until(lambda: len(first.lives()) == 2, "both recorders")
            at = {torch_at(reading.pid) for reading in first.lives().values()}
            assert len(at) == 1, "torch was imported once, and both workers are copies of the process that did"
            (life, reading), *_ = first.lives().items()
            assert "headrace.deploy worker" in Path(f"/proc/{reading.pid}/cmdline").read_text(), "forked, not executed"
            os.kill(reading.pid, signal.SIGKILL)
            first.wait_until(lambda: (life[0], life[1] + 1) in first.lives(), "its next life, in the same slot")
            first.wait_until(lambda: life not in first.lives(), "its recorder to go, once its books are final")
            pids = [reading.pid for reading in first.lives().values()]
            first.process.kill()
            wait_until(lambda: not any(map(is_running, pids)), "its workers to end")
            killed = first.lives()
            with group(tmp_path, *options) as second:
                second.wait_until(
                    lambda: not killed.keys() & second.lives().keys(), "the recorders of the killed to go"
                )
                books = fleet.snapshot()
                assert books is not None
                for life, reading in killed.items():
                    row = books.rows.get(life)
                    assert row is not None or life[1] in books.folded[life[0]]
                    assert row is None or (row.closed and row.totals.stepped == reading.totals.stepped)
                steps = fleet.steps()
                fleet.wait_until(lambda: fleet.steps() > steps + 2000, "new steps")
                second.process.terminate()
                assert second.process.wait(60) == 0, second.said()
                assert not list(second.scratch.glob("*/recorders/*.rec"))
                assert list(tmp_path.glob("runs/*/logs/worker-*.log")), "logs are swept to its run directory"
            fleet.terminate()
            result = fleet.finish()
            assert result["returncode"] == 0, result["stderr"]
            audited = fleet.audit()
            assert audited.returncode == 0, audited.stdout + audited.stderr
        assert result["ledger"]["queued"] == 0


@pytest.mark.thorough
@pytest.mark.chaos
def test_a_group_and_a_learner_follow_a_broker_to_new_ports(tmp_path: Path) -> None:
    meet = tmp_path / "meet.json"
    command = [
        sys.executable,
        "-m",
        "headrace.deploy",
        "broker",
        "--fleet-id",
        "demo",
        "--run-dir",
        str(tmp_path / "b"),
    ]
    command += ["--set", f"fleet.rendezvous={meet}", "--set", "broker.lease_s=3"]
    ports = [free_port() for _ in range(2)]
    steps = 0
    with group(tmp_path, "--rendezvous", str(meet), "--count", "1", *SETTINGS, *RANDOM) as workers:
        stream = None
        for number in range(2):
            with (tmp_path / "broker.log").open("ab") as log:
                broker = subprocess.Popen([*command, *by_tcp(ports[number])], stdout=log, stderr=log)
            try:
                stream = stream or EpisodeStream.of(meet, connect_timeout_s=TIMEOUT_S)
                until = steps + 2000
                while steps < until:
                    batch = stream.next(timeout_s=TIMEOUT_S)
                    assert batch is not None, workers.said()
                    steps += batch.steps
                assert stream.endpoint == f"tcp://127.0.0.1:{ports[number] + 1}"
            finally:
                broker.kill()
                broker.wait()
        assert stream is not None
        stream.close()


@pytest.mark.long
def test_a_group_that_cannot_find_its_fleet_ends_with_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace.deploy", "worker", "--count", "1", "--rendezvous"]
    for where, code, said in (
        (str(tmp_path / "none.json"), ExitCode.UNREACHABLE, "none.json cannot be read (No such file or directory)"),
        ("ftp://x/y", ExitCode.CONFIG, "should be a path, http://, https:// or dns://NAME"),
        ("dns://broker", ExitCode.CONFIG, "needs broker.port in the settings"),
    ):
        limit = ["--set", "worker.connect_timeout_s=1"]
        ended = subprocess.run(
            [*command, where, *limit], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert ended.returncode == code, ended.stderr
        assert said in ended.stderr.rpartition("error: ")[2]


def test_a_fenced_worker_of_a_group_asks_for_any_slot_at_its_restart(tmp_path: Path) -> None:
    config = build_config({"fleet": {"run_dir": str(tmp_path)}})
    with StopSignals() as signals:
        group = WorkerGroup(Joined(config, "", "tcp://127.0.0.1:1", None), (), signals)
        group._lives["worker"] = (1000, 1)
        for code, slot in ((ExitCode.CONFIG, 1000), (ExitCode.FENCED, None)):
            child = SimpleNamespace(exit_record=ExitRecord(pid=1, exit_code=code), pid=1, started=0.0)
            service = SimpleNamespace(child=child, spec=SimpleNamespace(name="worker"))
            group.ended(service, child, code)  # type: ignore[arg-type]
            assert group._slot_of("worker")() == slot
        group.close()
