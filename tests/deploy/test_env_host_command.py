"""`headrace env-host` as people mistype it, or aim it at the wrong port: each time one sentence that says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from headrace.schemas.env_messages import EnvHostWelcome
from headrace.schemas.errors import ExitCode
from headrace.schemas.wire import MessageKind, decode
from support.waiting import wait_until

pytestmark = pytest.mark.processes

WELCOME = EnvHostWelcome(worker_index=0, num_workers=1, num_envs=1, lease_s=10.0, heartbeat_interval_s=1.0)


@contextmanager
def env_host(log: Path, address: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "headrace.deploy", "env-host", "--connect", address, "--num-envs", "1", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(100)


@pytest.mark.parametrize(
    ("address", "arguments", "code", "words"),
    [
        ("localhost:5800", (), ExitCode.CONFIG, "--connect: should be tcp://HOST:PORT, got 'localhost:5800'"),
        ("tcp://localhost:99999", (), ExitCode.CONFIG, "--connect: should be tcp://HOST:PORT"),
        ("tcp://localhost:5800", ("--env", "No-v0"), ExitCode.ENV, "environment 'No-v0' cannot be found"),
        ("tcp://localhost:5800", ("--set", "keys.dir=nowhere"), ExitCode.KEYS, "env-host.secret cannot be used"),
    ],
)
def test_what_cannot_work_ends_at_once(
    address: str, arguments: tuple[str, ...], code: ExitCode, words: str, tmp_path: Path
) -> None:
    with env_host(tmp_path / "log", address, *arguments) as process:
        assert process.wait(100) == code
    (error,) = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("error: ")]
    assert words in error


def test_a_worker_of_another_version_is_named(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as worker:
        worker.linger = 0
        port = worker.bind_to_random_port("tcp://127.0.0.1")
        with env_host(tmp_path / "log", f"tcp://127.0.0.1:{port}") as process:
            assert worker.poll(100_000), "it says HELLO"
            route, *frames = worker.recv_multipart()
            assert decode(frames).kind is MessageKind.HELLO
            head, *rest = WELCOME.frames()
            worker.send_multipart([route, bytes(head[:4]) + b"\x63" + bytes(head[5:]), *rest])
            assert process.wait(100) == ExitCode.VERSION_MISMATCH
    assert f"error: worker at tcp://127.0.0.1:{port}" in (tmp_path / "log").read_text()


def test_while_nobody_answers_it_says_what_is_seen(tmp_path: Path, free_port: int) -> None:
    script = (
        "import headrace.workers.envs.remote.host.process as p; p._SAY_WAITING_S = 0.3; import headrace.deploy.__main__"
    )
    log = tmp_path / "log"
    arguments = ["env-host", "--connect", f"tcp://127.0.0.1:{free_port}", "--num-envs", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=output, stderr=output)
    try:
        wait_until(
            lambda: f"no worker answers at tcp://127.0.0.1:{free_port}" in log.read_text(), what="a word on that"
        )
        with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
            silent.linger = 0
            silent.bind(f"tcp://127.0.0.1:{free_port}")
            wait_until(lambda: "takes the connection and has said nothing" in log.read_text(), what="another word")
    finally:
        process.terminate()
        assert process.wait(100) == 0
