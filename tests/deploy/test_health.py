"""`headrace health` on real processes that wait, work, are stopped, do not respond, or are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from headrace.deploy.process.liveness_file import LivenessFile
from headrace.deploy.process.proc_stat import start_ticks
from headrace.deploy.run.fleet_file import read_addresses
from headrace.deploy.run.health import HealthFile, HealthRecord, Question, answer, asked_plainly, health_records
from headrace.schemas.accounts.recorder import Recorder
from headrace.schemas.errors import ExitCode
from support.waiting import TIMEOUT_S, wait_until

SETTINGS = ("--set", "sampling.num_envs=2", "--set", "learner.steps_per_update=64", "--set", "learner.epochs=1")


def health(run_dir: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "headrace.deploy", "health", "--run-dir", str(run_dir), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return done.returncode, done.stdout + done.stderr


def judged(run_dir: Path, *, ready: bool = False, within_s: float = 60.0) -> tuple[bool, str]:
    return answer(Question("", run_dir, ready), within_s)


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a role of a fleet in a run directory of its own, `tmp_path / role`."""
    with ExitStack() as stack:

        def start(role: str, *arguments: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((tmp_path / f"{role}.log").open("ab"))
            command = [sys.executable, "-m", "headrace.deploy", role, "--run-dir", str(tmp_path / role)]
            process = subprocess.Popen(
                [*command, "--fleet-id", "demo", *arguments, *SETTINGS], stdout=log, stderr=log, cwd=tmp_path
            )
            stack.callback(process.wait, 100)
            stack.callback(process.send_signal, signal.SIGCONT)
            stack.callback(process.terminate)
            return process

        yield start


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.long
def test_each_role_lives_and_is_ready_once_it_makes_progress(start: Start, tmp_path: Path) -> None:
    start("broker")
    wait_until(lambda: judged(tmp_path / "broker", ready=True)[0], "a broker that serves")
    endpoints = read_addresses(tmp_path / "broker")[1]
    worker = start("worker", "--endpoint", endpoints["worker"], "--env", "CartPole-v1")

    def waits_for_the_learner() -> bool:
        return "lives, and has taken no step yet" in judged(tmp_path / "worker", ready=True)[1]

    wait_until(waits_for_the_learner, "a worker that has joined")
    assert judged(tmp_path / "worker")[0], "it waits for others, and is healthy"
    assert health(tmp_path / "worker", "--ready")[0] == ExitCode.FINDINGS

    learner = start("learner", "--endpoint", endpoints["learner"])
    for role in ("worker", "learner"):
        wait_until(lambda role=role: judged(tmp_path / role, ready=True)[0], f"a {role} that makes progress")
    code, sentence = health(tmp_path / "worker", "--role", "worker", "--ready")
    assert (code, sentence) == (0, f"worker (pid {worker.pid}) makes progress\n")

    worker.send_signal(signal.SIGSTOP)
    wait_until(lambda: not judged(tmp_path / "worker")[0], "a worker that is stopped")
    code, sentence = health(tmp_path / "worker")
    assert code == ExitCode.FINDINGS
    assert sentence == f"worker (pid {worker.pid}) is stopped by a signal; continue it: kill -CONT {worker.pid}\n"
    worker.send_signal(signal.SIGCONT)
    wait_until(lambda: judged(tmp_path / "worker", ready=True)[0], "a worker that goes on")

    learner.terminate()
    assert learner.wait(100) == 0
    assert health(tmp_path / "learner", "--role", "learner") == (
        ExitCode.FINDINGS,
        f"no learner runs in {tmp_path / 'learner'}: none has started, or it has ended\n",
    )
    wait_until(lambda: not judged(tmp_path / "worker", ready=True, within_s=1.0)[0], "a worker that takes no step")
    assert judged(tmp_path / "worker")[0], "a full window is no fault of the worker"

    worker.kill()
    worker.wait(100)
    assert health(tmp_path / "worker")[1] == f"worker (pid {worker.pid}) was killed or has crashed\n"


def record(run_dir: Path, **changes: object) -> tuple[Path, dict[str, object]]:
    """A health file of this very process, and its content."""
    place = run_dir / "health" / f"broker-{os.uname().nodename}-{os.getpid()}.json"
    own = HealthRecord("broker", os.getpid(), start_ticks(os.getpid()), time.monotonic_ns(), 60.0, 10.0)
    content = asdict(own) | changes
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(content))
    return place, content


def aged(place: Path, seconds: float) -> None:
    os.utime(place, ns=(time.monotonic_ns() - int(seconds * 1e9),) * 2)


def test_a_process_without_a_recent_sign_of_life_is_unhealthy(tmp_path: Path) -> None:
    place, _ = record(tmp_path, began_ns=time.monotonic_ns() - 3600 * 10**9)
    aged(place, 9.0)
    assert judged(tmp_path, ready=True) == (True, f"broker (pid {os.getpid()}) makes progress")
    aged(place, 11.0)
    assert judged(tmp_path) == (False, f"broker (pid {os.getpid()}) has given no sign of life for 11 s")


def test_a_starting_process_is_healthy_for_sixty_seconds_only(tmp_path: Path) -> None:
    place, _ = record(tmp_path, began_ns=time.monotonic_ns() - 59 * 10**9)
    os.utime(place, ns=(0, 0))
    assert judged(tmp_path)[0]
    assert not judged(tmp_path, ready=True)[0]
    place, _ = record(tmp_path, began_ns=time.monotonic_ns() - 61 * 10**9)
    os.utime(place, ns=(0, 0))
    assert judged(tmp_path) == (False, f"broker (pid {os.getpid()}) has been starting for 61 s, of at most 60")


def test_a_reused_pid_is_not_taken_for_the_recorded_process(tmp_path: Path) -> None:
    record(tmp_path, start_ticks=start_ticks(os.getpid()) - 1)
    assert judged(tmp_path) == (False, f"broker (pid {os.getpid()}) was killed or has crashed")


def test_the_recorder_of_an_earlier_life_with_the_same_pid_shows_no_progress(tmp_path: Path) -> None:
    """In a container each life has pid 1, and the recorders of all lives stay in the pod's volume."""
    recorder = Recorder(tmp_path / "worker-0-1.rec", 0, 1)
    recorder.step(8, 8, 8, {})
    record(tmp_path, role="worker", recorders=str(tmp_path))
    assert "has been starting for 0 s" in judged(tmp_path, ready=True)[1]
    recorder.step(16, 16, 16, {})
    recorder.close()
    assert judged(tmp_path, ready=True) == (True, f"worker (pid {os.getpid()}) makes progress")


def test_a_start_removes_the_health_file_of_a_killed_process_of_its_role(tmp_path: Path) -> None:
    place, _ = record(tmp_path, start_ticks=1)
    killed = place.with_name(place.name.replace(str(os.getpid()), "999999999"))
    place.rename(killed)
    other = killed.with_name(killed.name.replace("broker-", "learner-"))
    other.write_text(killed.read_text().replace('"broker"', '"learner"'))
    with HealthFile(tmp_path, "broker", LivenessFile(None), starts_within_s=60.0, silent_within_s=10.0) as own:
        own.alive()
        assert not killed.exists()
        assert other.exists(), "it is for the next learner to remove"
        assert [found.role for _, found in health_records(tmp_path)] == ["broker", "learner"]
        assert answer(Question("broker", tmp_path, ready=True))[0]
    assert not list(health_records(tmp_path, "broker"))


def test_a_damaged_health_file_counts_as_no_process(tmp_path: Path) -> None:
    place, _ = record(tmp_path)
    for content in (b"", b"{}", b"[1]", b"\xff", b'{"role": "broker"}'):
        place.write_bytes(content)
        assert judged(tmp_path) == (False, f"no process runs in {tmp_path}: none has started, or it has ended")


@pytest.mark.processes
def test_a_run_directory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    place = tmp_path / ("long" * 100)
    told = f"{place} cannot be read: File name too long; repair that, or name another\n"
    for words in ((), ("--within-s", "60")):
        assert health(place, *words) == (ExitCode.FINDINGS, told)


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (["--run-dir", "runs/a"], Question("", Path("runs/a"), ready=False)),
        (["--ready", "--run-dir", "runs/a"], Question("", Path("runs/a"), ready=True)),
        (["--role", "worker", "--ready"], Question("worker", Path("runs/env"), ready=True)),
        ([], Question("", Path("runs/env"), ready=False)),
        (["--help"], None),
        (["--role"], None),
        (["--role", "--ready"], None),
        (["--within-s", "3"], None),
        (["--run-dir=runs/a"], None),
    ],
)
def test_only_plain_command_lines_of_probes_skip_the_full_command(
    words: list[str], question: Question | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_FLEET__RUN_DIR", "runs/env")
    assert asked_plainly(words) == question


@pytest.mark.processes
def test_a_plain_probe_and_the_full_command_give_the_same_answer(tmp_path: Path) -> None:
    place, _ = record(tmp_path)
    place.touch()
    lives = (0, f"broker (pid {os.getpid()}) makes progress\n")
    for words in (("--role", "broker"), ("--role=broker", "--within-s", "60")):
        wait_until(lambda words=words: health(tmp_path, *words) == lives, "a look while nobody stops this process")
    aged(place, 11.0)
    record_place, _ = record(tmp_path, start_ticks=1)
    assert health(tmp_path) == health(tmp_path, "--within-s=60") != lives
    assert record_place == place


@pytest.mark.processes
def test_a_probe_imports_no_large_library(tmp_path: Path) -> None:
    script = """
import atexit, sys
sys.argv = ["headrace", "health", "--run-dir", sys.argv[1]]
large = {"torch", "numpy", "pydantic", "typer", "redis", "zmq", "gymnasium", "rich"}
atexit.register(lambda: print(sorted(large & set(sys.modules))))
from headrace.deploy.command.entry import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (ExitCode.FINDINGS, "[]")
