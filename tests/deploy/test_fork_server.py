"""The fork server: a forked process is like an executed one, and a fleet also runs without the server."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.deploy.command.entry import INTERRUPTED
from headrace.deploy.process.child import Child
from headrace.deploy.process.child_environment import child_environment
from headrace.deploy.process.exit_record import ExitRecord
from headrace.deploy.process.fork_server import HEADRACE, ForkServer, early_or_new, start_early
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.schemas.errors import ExitCode
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes

ENVIRONMENT = {name: value for name, value in child_environment(1).items() if not name.startswith("PYTEST_")}
BROKER = [*HEADRACE, "broker", "--fleet-id", "forked", "--run-dir"]
SEED_TELLER = """
import os
import sys
import weakref

import gymnasium as gym
import numpy as np
import torch

from headrace.schemas.basics.headrace_version import program_name


def make(context):
    with open(os.environ["TOLD"], "a") as told:
        finalizers = sum(one.atexit for one in weakref.finalize._registry)
        names = list(sys.modules)
        later = names[names.index("headrace.workers.fleet.worker") + 1 :]
        late = ",".join(name for name in later if name.startswith("headrace"))
        told.write(f"{np.random.random()}/{torch.rand(()).item()}/{finalizers}/{late}/{program_name()}\\n")
    return gym.make("CartPole-v1")
"""

ENDLESS_IMPORT = """
import os
import pathlib
import time

pathlib.Path(__file__).with_name(f"typer-{os.getpid()}").touch()
time.sleep(1000)
"""


def ready(fork_server: ForkServer) -> ForkServer:
    readable, _, _ = select.select([fork_server.fd], [], [], TIMEOUT_S)
    assert readable, "the fork server was never ready"
    fork_server.take_news()
    assert fork_server.is_ready
    return fork_server


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(ENVIRONMENT) as made:
        yield ready(made)


def forked(fork_server: ForkServer, log: Path, *arguments: str) -> Child:
    child = Child([*HEADRACE, *arguments], log, env=ENVIRONMENT, fork_server=fork_server)
    maps = Path(f"/proc/{child.pid}/maps").read_text()  # empty once it has ended: an executed one takes a second to
    assert not maps or "libtorch" in maps, "it was executed"
    return child


def serving(fork_server: ForkServer, folder: Path) -> Child:
    child = forked(fork_server, folder / "broker.log", "broker", "--fleet-id", "f", "--run-dir", str(folder / "run"))
    wait_until((folder / "run" / "broker.json").exists, "the broker to serve")
    return child


def ended(child: Child) -> int:
    readable, _, _ = select.select([child.pidfd], [], [], TIMEOUT_S)
    assert readable, "the child did not end"
    return child.reap()


def test_a_forked_process_is_our_child_in_a_session_of_its_own_and_shows_its_command(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    child = serving(fork_server, tmp_path)
    status = Path(f"/proc/{child.pid}/status").read_text()
    assert f"PPid:\t{os.getpid()}" in status
    assert os.getsid(child.pid) == child.pid
    assert Path(f"/proc/{child.pid}/fd/0").readlink() == Path(os.devnull)
    assert Path(f"/proc/{child.pid}/fd/1").readlink() == tmp_path / "broker.log"
    assert "headrace.deploy broker --fleet-id f" in Path(f"/proc/{child.pid}/cmdline").read_text()
    child.send(signal.SIGTERM)
    assert ended(child) == 0


def test_the_end_of_a_forked_process_is_reported_like_any_childs(fork_server: ForkServer, tmp_path: Path) -> None:
    wrong = forked(fork_server, tmp_path / "worker.log", "worker", "--endpoint", "nowhere")
    assert ended(wrong) == ExitCode.CONFIG
    assert isinstance(wrong.exit_record, ExitRecord)
    assert "should be tcp://HOST:PORT" in str(wrong.last_error())
    killed = serving(fork_server, tmp_path)
    killed.send(signal.SIGKILL)
    assert ended(killed) == -signal.SIGKILL
    assert killed.exit_record is None


@pytest.mark.parametrize("command", ["worker", "up"])
@pytest.mark.parametrize("what", ["sys.exit(4)", "raise ValueError", "pool.submit(int); sys.exit(4)"])
def test_a_process_ends_with_its_own_code_without_its_threads_that_never_end(what: str, command: str) -> None:
    program = f"""
import atexit, sys, threading
from concurrent.futures import ThreadPoolExecutor
from headrace.deploy.command import entry
atexit.register(print, "bye")
pool = ThreadPoolExecutor(1)
def run():
    if "pool" not in {what!r}:
        threading.Thread(target=threading.Event().wait, name="endless").start()
    {what}
entry._import_command_line = lambda: run
entry._start_fork_server = lambda: None
entry._PATIENCE_S = entry._PATIENCE_OF_UP_S = 0.1
entry.main()
"""
    run = subprocess.run(
        [sys.executable, "-c", program, command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert run.returncode == (1 if "ValueError" in what else 4)
    assert run.stdout == "bye\n"
    assert ("left behind: thread 'endless'" in run.stderr) == ("pool" not in what)


def test_the_fork_server_refuses_other_commands_and_environments(fork_server: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        ours, others = ENVIRONMENT, ENVIRONMENT | {"OMP_NUM_THREADS": "7"}
        assert fork_server.fork([sys.executable, "-c", "pass"], ours, {}, log) is None
        assert fork_server.fork([*HEADRACE, "--version"], others, {}, log) is None


def test_an_early_fork_server_is_used_only_in_its_own_environment(fork_server: ForkServer) -> None:
    assert fork_server.is_ready
    start_early(ENVIRONMENT)
    with early_or_new(ENVIRONMENT) as early:
        start_early(ENVIRONMENT | {"OMP_NUM_THREADS": "7"})
        with early_or_new(ENVIRONMENT) as new:
            assert new.fd != early.fd
            assert early.forks_in(ENVIRONMENT)
            assert new.forks_in(ENVIRONMENT)
        wait_until(lambda: len(fork_servers_of(os.getpid())) == 2, "the module's own and the early one, and no other")


def fork_servers_of(pid: int) -> list[int]:
    """The fork servers that the main thread of this process has started, as far as they live."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"fork_server_program" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize("words", [["up"], ["worker", "--count", "1"]], ids=" ".join)
def test_ctrl_c_in_the_midst_of_the_imports_leaves_no_fork_server(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "typer.py").write_text(ENDLESS_IMPORT)
    command = [*HEADRACE, *words, "--run-dir", str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        wait_until((tmp_path / f"typer-{process.pid}").exists, "the import of a module that takes long")
        wait_until(lambda: fork_servers_of(process.pid), "the fork server of the start")
        found = fork_servers_of(process.pid)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == INTERRUPTED, said
    assert "Traceback" not in said
    wait_until(lambda: not is_alive(found[0]), "the end of the fork server")


def test_forked_processes_die_with_their_parent_and_outlive_the_fork_server(tmp_path: Path) -> None:
    script = f"""
        import pathlib, select, signal
        from headrace.deploy.process.child import Child
        from headrace.deploy.process.child_environment import child_environment
        from headrace.deploy.process.fork_server import HEADRACE, ForkServer
        folder = pathlib.Path({str(tmp_path)!r})
        with ForkServer(child_environment(1)) as fork_server:
            select.select([fork_server.fd], [], [])
            fork_server.take_news()
            command = [*HEADRACE, "broker", "--fleet-id", "f", "--run-dir", str(folder)]
            child = Child(command, folder / "log", env=child_environment(1), fork_server=fork_server)
        while not (folder / "broker.json").exists():
            pass
        print(child.pid, flush=True)
        signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    wait_until(lambda: not is_alive(child), "the end of the forked process")


def test_a_child_is_executed_where_the_fork_server_was_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ForkServer(ENVIRONMENT) as fork_server:
        ready(fork_server)
        os.kill(_fork_server_of(os.getpid()), signal.SIGKILL)
        command = [*HEADRACE, "--version"]
        child = Child(command, tmp_path / "log", env=ENVIRONMENT, fork_server=fork_server)
        assert ended(child) == 0
    assert child.log_lines(1)[0].startswith("headrace ")
    assert "the fork server" in caplog.text


def test_a_fork_server_that_does_not_answer_is_ended_and_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.deploy.process.fork_server._ANSWER_S", 0.2)
    with ForkServer(ENVIRONMENT) as fork_server:
        ready(fork_server)
        os.kill(_fork_server_of(os.getpid()), signal.SIGSTOP)
        with (tmp_path / "log").open("ab") as log:
            command = [*BROKER, str(tmp_path / "run")]
            assert fork_server.fork(command, ENVIRONMENT, {}, log) is None
        assert fork_server.has_ended
    assert not (tmp_path / "run").exists()


def test_restarted_workers_are_forked_with_random_numbers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seed_teller.py").write_text(SEED_TELLER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TOLD", str(told := tmp_path / "told"))

    def lives() -> list[str]:
        return told.read_text().splitlines()

    with RunningFleet(tmp_path / "run", "--env", "seed_teller:make", "--workers", "2", "--num-envs", "1") as fleet:
        fleet.wait_until(lambda: fleet.steps() > 1_000, "sampling has begun")
        first = fleet.send(signal.SIGKILL, "worker", slot=0)
        fleet.wait_until(lambda: fleet.pid("worker", 0) not in (None, first), "a new worker")
        assert "libtorch" in Path(f"/proc/{fleet.pid('worker', 0)}/maps").read_text()
        supervisor = read_fleet_file(tmp_path / "run" / "fleet.json").supervisor_pid
        assert len(fork_servers_of(supervisor)) == 1, "the early one was not used"
        fleet.wait_until(lambda: len(lives()) >= 4, "one life of the check, two of workers, one again")
        fleet.terminate()
        assert fleet.finish()["returncode"] == 0
    seeds, torch_seeds, finalizers, modules, programs = zip(*(line.split("/") for line in lives()), strict=True)
    assert set(programs) == {"python -m headrace.deploy"}
    assert len(set(seeds)) == len(set(torch_seeds)) == len(lives())
    assert max(map(int, finalizers)) < 10, "each process that ends runs those of what the fork server has imported"
    assert set(modules) == {""}, "each process imports modules of Headrace that the fork server could have imported"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("module", "code", "reason"),
    [
        ("sitecustomize", "import _thread, signal; _thread.start_new_thread(signal.pause, ())", "had 2 threads"),
        ("gymnasium", "raise ValueError('no envs here')", "ValueError: no envs here"),
    ],
)
def test_a_fork_server_that_cannot_fork_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, module: str, code: str, reason: str
) -> None:
    (tmp_path / f"{module}.py").write_text(code)
    with ForkServer({**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}) as fork_server:
        wait_until(lambda: fork_server.take_news() or fork_server.has_ended, "the news")
    assert reason in caplog.text


def _fork_server_of(parent: int) -> int:
    """Return the pid of the newest fork server that `parent` has started."""
    found = subprocess.run(
        ["pgrep", "--newest", "--parent", str(parent), "--full", "fork_server_program"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(found.stdout)
