"""SIGTERM at any moment: a manager of jobs sends it to each process of a fleet at once, or to a command that starts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.schemas.peers.rendezvous import Published
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes

RUN = ("--workers", "1", "--num-envs", "2", "--set", "learner.steps_per_update=256", "--set", "learner.epochs=1")


@pytest.mark.thorough
def test_sigterm_stops_only_the_supervisor_which_drains_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with RunningFleet(tmp_path / "run", *RUN) as fleet:
        fleet.wait_until(lambda: weights_seq(fleet) > 1, "the learner trains")
        pids = [process.pid for process in read_fleet_file(tmp_path / "run" / "fleet.json").processes]
        trained = weights_seq(fleet)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        fleet.wait_until(lambda: weights_seq(fleet) > trained + 5, "the learner trains on")
        assert [process.pid for process in read_fleet_file(tmp_path / "run" / "fleet.json").processes] == pids
        fleet.terminate()
        summary = fleet.finish()
    assert set(summary["restarts"].values()) == {0}, summary
    assert "is killed" not in summary["stderr"]
    fleet.audited()


def weights_seq(fleet: RunningFleet) -> int:
    snapshot = fleet.snapshot()
    return int(snapshot.gauges.get("weights_seq", 0)) if snapshot else 0


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[socket.socket]:
    """A broker that never answers. The file meet.json is its rendezvous."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        at = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        Published(fleet_id="demo", endpoints=dict.fromkeys(("worker", "learner", "weights"), at)).write(
            tmp_path / "meet.json"
        )
        yield server


def started(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """A command whose handlers of signals are in place."""
    command = subprocess.Popen(
        [sys.executable, "-m", "headrace.deploy", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: handles_sigterm(command.pid), "the handler of SIGTERM")
    return command


def handles_sigterm(pid: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("words", ["record meet.json --dir recording", "learner --rendezvous meet.json --run-dir run"])
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_reader_that_connects_to_a_silent_broker_ends_in_order(
    tmp_path: Path, silent: socket.socket, words: str, number: signal.Signals
) -> None:
    with started(tmp_path, *words.split()) as command, silent.accept()[0]:
        command.send_signal(number)
        _, errors = command.communicate(timeout=TIMEOUT_S)
    assert (command.returncode, errors.splitlines()[-1]) == (0, f"stopped by {number.name}")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "words",
    [
        *("record meet.json --dir recording", "learner --rendezvous meet.json --run-dir run", "doctor"),
        *("worker --rendezvous meet.json --run-dir run --env CartPole-v1", "broker --run-dir run --fleet-id demo"),
        *("up --env CartPole-v1 --workers 1 --run-dir run", "env-host --rendezvous meet.json --env CartPole-v1"),
        *("worker --rendezvous meet.json --run-dir run --count 2 --env CartPole-v1", "audit --run-dir run"),
    ],
)
def test_a_signal_at_any_moment_of_a_start_ends_a_command_in_order(
    tmp_path: Path, silent: socket.socket, words: str, after_s: float, number: signal.Signals
) -> None:
    """It may have ended by itself before, with an error or without."""
    with started(tmp_path, *words.split()) as command:
        time.sleep(after_s)  # the moment is what is tested; any outcome in order is right
        command.send_signal(number)
        _, errors = command.communicate(timeout=TIMEOUT_S)
    if (code := command.returncode) == 128 + signal.SIGTERM:
        assert errors.splitlines()[-1] == "stopped by SIGTERM"
    assert "Traceback" not in errors
    assert code == 128 + number or code == 0 or (code > 0 and errors.splitlines()[-1].startswith("error: ")), errors
