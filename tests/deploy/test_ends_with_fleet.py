"""Workers that were started elsewhere find the fleet by its page, end with it, and their ends are in its books."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from headrace.deploy.run import joining
from headrace.deploy.run.options import Asked
from headrace.schemas.errors import ExitCode, RunDirError
from headrace.schemas.peers.rendezvous import Port, Published, Rendezvous
from headrace.schemas.settings.config_loading import build_config
from support.fleets.running_fleet import RunningFleet, snapshot_of
from support.ports import free_port
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.processes

ENDS = ("--set", "worker.ends_with_fleet=true", "--set", "learner.steps_per_update=256", "--num-envs", "2")


@contextmanager
def workers_for(where: str, own: Path) -> Iterator[subprocess.Popen[str]]:
    """A group of two workers with a run directory of its own."""
    command = [sys.executable, "-m", "headrace.deploy", "worker", "--count", "2", *ENDS, "--run-dir", str(own)]
    command += ["--rendezvous", where]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as workers:
        try:
            yield workers
        finally:
            if workers.poll() is None:
                workers.kill()


@pytest.mark.thorough
def test_a_group_of_workers_leaves_at_the_goal_and_the_books_are_closed(tmp_path: Path) -> None:
    run, elsewhere, port = tmp_path / "run", tmp_path / "elsewhere", free_port()
    dashboard = ("--dashboard", "--set", f"dashboard.port={port}")
    with (
        RunningFleet(run, "--workers", "0", "--until-steps", "1500", *ENDS, *dashboard) as fleet,
        workers_for(f"http://127.0.0.1:{port}/rendezvous.json", elsewhere) as workers,
    ):
        result = fleet.finish()
        said = workers.communicate(timeout=TIMEOUT_S)[1]
        assert (result["returncode"], workers.returncode) == (0, 0), result["stderr"] + said
        assert "takes no more steps; this worker leaves" in logs_of(elsewhere)
        rows = fleet.audited()["rows"]
        assert {row["closed"] for row in rows} == {True}


@pytest.mark.thorough
def test_workers_end_after_a_failed_broker_and_the_next_start_closes_the_books(
    tmp_path: Path,
) -> None:
    """Scratch and run directory are one here, so that the next start finds the recorders."""
    run = tmp_path / "run"
    with (
        RunningFleet(run, "--workers", "1", *ENDS, "--set", "supervisor.restart_attempts=0") as fleet,
        workers_for(str(run / "rendezvous.json"), run) as workers,
    ):
        fleet.wait_until(lambda: len(open_lives(run)) == 3, "three workers step")
        lives = open_lives(run)
        fleet.send(signal.SIGKILL, "broker")
        result = fleet.finish()
        said = workers.communicate(timeout=TIMEOUT_S)[1]
        assert (result["returncode"], workers.returncode) == (ExitCode.CRASH_LOOP, 0), result["stderr"] + said
    assert logs_of(run).count("the fleet has stopped; the recorder keeps the books for its next start") == 3
    audit = fleet.audit()
    assert audit.returncode == ExitCode.LEDGER, audit.stdout
    assert "; the next `headrace up` in this run directory reads the recorder" in audit.stderr
    assert all(f"slot {slot} incarnation {incarnation}: " in audit.stderr for slot, incarnation in lives)
    with RunningFleet(run, "--workers", "1", "--until-steps", "1", *ENDS) as again:
        assert again.finish()["returncode"] == 0
    assert again.audited()["ledger"]["dropped"]


STOPPED = Published(fleet_id="f", state="stopped", endpoints={"worker": "tcp://127.0.0.1:1"})


@pytest.mark.parametrize(
    ("role", "ends_with_fleet", "address"),
    [("worker", True, None), ("env-host", True, None), ("worker", False, ""), ("learner", True, "")],
)
def test_a_process_that_finds_its_fleet_stopped_leaves_only_if_it_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, ends_with_fleet: bool, address: str | None
) -> None:
    monkeypatch.setattr(joining, "STOPPED_WAIT_S", 0.3)
    meet = tmp_path / "meet.json"
    STOPPED.write(meet)
    worker = {"ends_with_fleet": ends_with_fleet, "connect_timeout_s": 60.0 if address is None else 0.6}
    config = build_config({"worker": worker})
    assert joining.await_place(Rendezvous(str(meet)), role, config) == address


def test_a_worker_of_a_stopped_run_says_so_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fleet = {"redis_url": "", "fleet_id": "f", "state": "stopped"}
    (tmp_path / "fleet.json").write_bytes(orjson.dumps(fleet))
    flags = {"fleet.run_dir": str(tmp_path), "worker.connect_timeout_s": 0.1}
    with pytest.raises(RunDirError, match="was stopped; go on with `headrace up --resume "):
        joining.join(Asked(flags=flags), None, "worker")
    assert f"the fleet in {tmp_path} was stopped; go on with" in capfd.readouterr().err


def test_a_process_waits_a_while_for_a_stopped_fleet_to_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "STOPPED_WAIT_S", TIMEOUT_S)
    meet = tmp_path / "meet.json"
    STOPPED.write(meet)
    config = build_config({"worker": {"ends_with_fleet": True}})
    again = threading.Timer(0.5, lambda: STOPPED.model_copy(update={"state": "running"}).write(meet))
    again.start()
    assert joining.await_place(Rendezvous(str(meet)), "worker", config) == "tcp://127.0.0.1:1"
    again.join()


def test_an_env_host_leaves_with_the_fleet_that_it_waits_for(tmp_path: Path) -> None:
    meet, port = tmp_path / "meet.json", free_port()
    running = Published(fleet_id="f", endpoints={}, ports={"envs-0": Port(address=f"tcp://127.0.0.1:{port}")})
    running.write(meet)
    command = [sys.executable, "-m", "headrace.deploy", "env-host", "--env", "CartPole-v1", *ENDS]
    command += ["--rendezvous", str(meet), "--set", "sampling.env_placement=remote"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as host:
        assert host.stderr is not None
        said = iter(host.stderr.readline, "")
        assert any("for the worker at" in line for line in said)
        running.model_copy(update={"state": "stopped"}).write(meet)
        assert any("the fleet has stopped; this env host leaves" in line for line in said)
        assert host.wait(TIMEOUT_S) == 0


def open_lives(run: Path) -> list[tuple[int, int]]:
    """The lives that have stepped and are not closed in the books."""
    snapshot = snapshot_of(run)
    rows = snapshot.rows.items() if snapshot is not None else ()
    return [life for life, row in rows if row.totals.stepped and not row.closed]


def logs_of(run_dir: Path) -> str:
    return "".join(path.read_text() for path in run_dir.glob("logs/*.log"))
