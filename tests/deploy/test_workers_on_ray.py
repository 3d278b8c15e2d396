"""`headrace ray` without a Ray: the guard of a worker, addresses, settings and scaling."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.deploy.annexes.ray import worker_actor
from headrace.deploy.annexes.ray.cluster import reachable
from headrace.deploy.annexes.ray.wanted_workers import read_wanted, scale_run, write_wanted
from headrace.deploy.annexes.ray.worker_actor import WorkerEnd
from headrace.deploy.annexes.ray.workers_on_ray import told
from headrace.deploy.fleet.scale import check_numbers
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.run.fleet_file import FleetFile
from headrace.schemas.errors import ConfigError, ExitCode, RunDirError
from support.waiting import TIMEOUT_S, wait_until

GUARD = Path(worker_actor.__file__).with_name("guard.py")
DRAINS = """
import os, pathlib, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
pathlib.Path("pids").write_text(f"{os.getpid()} {os.getppid()}")
signal.sigwait([signal.SIGTERM])
pathlib.Path("drained").touch()
os._exit(7)
"""
"""It waits by sigwait: a handler of Python's does not run for a signal that comes just before signal.pause()."""
IS_DEAF = DRAINS.replace("signal.sigwait([signal.SIGTERM])", "while True: signal.pause()")


ACTOR = """
import os, pathlib, signal
from headrace.deploy.annexes.ray.worker_actor import WorkerActor, WorkerStart
WorkerActor("worker", WorkerStart(b"{}", "demo", 1, (), 1.0))
pathlib.Path("actor.new").write_text(str(os.getpid()))
pathlib.Path("actor.new").rename("actor")
while True: signal.pause()
"""
RAYLET = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ACTOR!r}])"


def guarded(script: str, folder: Path, grace_s: float = 60.0) -> socket.socket:
    """Start a script under a guard; returns the line to it."""
    line, far_end = socket.socketpair()
    command = [
        sys.executable,
        "-I",
        "-S",
        str(GUARD),
        str(far_end.fileno()),
        str(grace_s),
        sys.executable,
        "-c",
        script,
    ]
    with far_end:
        subprocess.run(command, cwd=folder, pass_fds=(far_end.fileno(),), check=True, timeout=TIMEOUT_S)
    line.settimeout(100)
    return line


def pids(folder: Path) -> list[int]:
    """The pids of the script and of its guard."""
    path = folder / "pids"
    wait_until(lambda: path.exists() and len(path.read_text().split()) == 2, "the script runs")
    return [int(pid) for pid in path.read_text().split()]


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.processes
def test_a_worker_drains_when_its_actor_asks_and_the_actor_gets_its_exit_code(tmp_path: Path) -> None:
    with guarded(DRAINS, tmp_path) as line:
        script, _ = pids(tmp_path)
        line.shutdown(socket.SHUT_WR)
        assert line.makefile().readline() == f"{script} 7\n"
    assert (tmp_path / "drained").exists()


@pytest.mark.processes
def test_a_worker_drains_when_its_actor_is_killed(tmp_path: Path) -> None:
    line = guarded(DRAINS, tmp_path)
    script, guard = pids(tmp_path)
    status = Path(f"/proc/{guard}/status").read_text()
    assert f"PPid:\t{os.getpid()}\n" not in status, "Ray kills the children of an actor"
    line.close()
    wait_until(lambda: ended(script) and ended(guard), "the end of worker and guard")
    assert (tmp_path / "drained").exists()


@pytest.mark.processes
def test_a_worker_that_does_not_drain_is_killed_after_its_grace(tmp_path: Path) -> None:
    with guarded(IS_DEAF, tmp_path, 0.2) as line:
        script, _ = pids(tmp_path)
        line.shutdown(socket.SHUT_WR)
        assert line.makefile().readline() == f"{script} {-signal.SIGKILL}\n"


@pytest.mark.processes
def test_a_worker_ends_with_its_guard(tmp_path: Path) -> None:
    with guarded(DRAINS, tmp_path) as line:
        script, guard = pids(tmp_path)
        os.kill(guard, signal.SIGKILL)
        assert line.makefile().readline() == ""
        wait_until(lambda: ended(script), "the end of the worker")


@pytest.mark.processes
def test_an_actor_ends_with_its_raylet(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET], cwd=tmp_path, env=environment)
    try:
        wait_until((tmp_path / "actor").exists, "the actor lives")
    finally:
        raylet.kill()
        raylet.wait()
    actor = int((tmp_path / "actor").read_text())
    wait_until(lambda: ended(actor), "the end of the actor")


def test_a_wildcard_address_becomes_the_ray_address_of_this_machine() -> None:
    assert reachable("tcp://0.0.0.0:5701", "10.0.0.1", {"10.0.0.1", "10.0.0.2"}) == "tcp://10.0.0.1:5701"
    assert reachable("tcp://[::]:5701", "fd00::1", {"fd00::1"}) == "tcp://[fd00::1]:5701"
    assert reachable("tcp://head:5701", "10.0.0.1", {"10.0.0.2"}) == "tcp://head:5701"


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5701", "ipc:///run/worker"])
def test_a_broker_for_this_machine_only_is_refused_where_the_cluster_has_other_nodes(endpoint: str) -> None:
    assert reachable(endpoint, "10.0.0.1", {"10.0.0.1"}) == endpoint
    with pytest.raises(ConfigError, match=r"nodes elsewhere \(10\.0\.0\.2\)"):
        reachable(endpoint, "10.0.0.1", {"10.0.0.1", "10.0.0.2"})


@pytest.mark.parametrize("code", [ExitCode.ENV, ExitCode.CRASH_LOOP])
def test_a_group_that_has_given_its_worker_up_is_not_started_again(code: ExitCode) -> None:
    assert told(WorkerEnd(code, "worker-0 died 11 times in a row", announced=True))[1] is code
    assert told(WorkerEnd(code, "only a print of the env"))[1] is None


def test_scale_returns_the_old_number_of_workers_on_ray_and_writes_the_new(tmp_path: Path) -> None:
    fleet = FleetFile(fleet_id="demo", state="running", supervisor_pid=os.getpid())
    fleet.write(tmp_path / "fleet.json")
    with pytest.raises(FleetError, match="keeps no workers on Ray"):
        scale_run(tmp_path, 3)
    entry = {"name": "ray", "role": "ray", "incarnation": 1, "pid": 1, "started": 0.0}
    FleetFile.model_validate({**fleet.model_dump(), "processes": [entry]}).write(tmp_path / "fleet.json")
    (tmp_path / "config.json").write_text('{"fleet": {"workers": 0}, "ray": {"workers": 2}}')
    write_wanted(tmp_path, 2)
    assert scale_run(tmp_path, 3) == 2
    assert read_wanted(tmp_path) == 3
    (tmp_path / "ray.json").write_text('{"workers": -1}')
    with pytest.raises(RunDirError, match=r"ray\.json does not say"):
        read_wanted(tmp_path)


def test_workers_here_and_on_ray_count_together_where_either_number_is_changed(
    tmp_path: Path,
) -> None:
    entry = {"name": "ray", "role": "ray", "incarnation": 1, "pid": 1, "started": 0.0}
    fleet = {"fleet_id": "demo", "state": "running", "supervisor_pid": os.getpid(), "processes": [entry]}
    FleetFile.model_validate(fleet).write(tmp_path / "fleet.json")
    settings = '{"broker": {"max_held_batches": 5}, "fleet": {"workers": 1}, "ray": {"workers": 1}}'
    (tmp_path / "config.json").write_text(settings)
    write_wanted(tmp_path, 1)
    with pytest.raises(FleetError, match="3 workers and the learner would wait for each other"):
        scale_run(tmp_path, 2)
    (tmp_path / "workers.json").write_text('{"workers": 0}')
    assert scale_run(tmp_path, 2) == 1
    with pytest.raises(FleetError, match="3 workers and the learner would wait for each other"):
        check_numbers(tmp_path, {"fleet.workers": 1})
    (tmp_path / "config.json").write_text('{"sampling": {"synchronous": true}, "ray": {"workers": 1}}')
    with pytest.raises(FleetError, match="synchronous = true needs a fixed number"):
        scale_run(tmp_path, 1)
    assert read_wanted(tmp_path) == 2


def test_ray_workers_wait_at_the_rendezvous_that_the_environment_names(tmp_path: Path) -> None:
    at = tmp_path / "rendezvous.json"
    lend = [sys.executable, "-m", "headrace.deploy", "ray", "workers", "--count", "1"]
    named = {**os.environ, "HEADRACE_FLEET__RENDEZVOUS": str(at), "HEADRACE_WORKER__CONNECT_TIMEOUT_S": "0.1"}
    ended = subprocess.run(
        lend, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=tmp_path, env=named
    )
    assert (ended.returncode, str(at) in ended.stderr) == (ExitCode.UNREACHABLE, True), ended.stderr


def test_ray_up_takes_the_options_of_up(tmp_path: Path) -> None:
    chosen = ["--workers", "3", "--env", "CartPole-v1", "--until-steps", "100", "--set", "learner.epochs=2"]
    command = [
        sys.executable,
        "-m",
        "headrace.deploy",
        "ray",
        "up",
        *chosen,
        "--address",
        "head:6379",
        "--print-config",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=tmp_path)
    assert shown.returncode == ExitCode.OK, shown.stderr
    lines = [" ".join(line.partition("#")[0].split()) for line in shown.stdout.splitlines()]
    assert {'address = "head:6379"', "workers = 3", "workers = 0", "until_steps = 100", "epochs = 2"} <= set(lines)
