"""`headrace env-host` with mistyped options or a wrong port: each gives an error of one sentence."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
import zmq

from headrace.deploy.run.fleet_file import FleetFile
from headrace.schemas.errors import ExitCode
from headrace.schemas.frames.wire import MessageKind, decode
from headrace.schemas.peers.rendezvous import Port, Published
from headrace.workers.envs.remote.env_messages import EnvHostWelcome
from support.waiting import wait_until

pytestmark = pytest.mark.processes

WELCOME = EnvHostWelcome(worker_index=0, num_workers=1, num_envs=1, lease_s=10.0, heartbeat_interval_s=1.0)


@contextmanager
def env_host(log: Path, address: str | Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """An env host for the worker at an address, or of the run in a folder."""
    at = ["--run-dir", str(address)] if isinstance(address, Path) else ["--connect", address]
    command = [sys.executable, "-m", "headrace.deploy", "env-host", *at, "--num-envs", "1", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(100)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("address", "arguments", "code", "words"),
    [
        (
            "localhost:5800",
            (),
            ExitCode.CONFIG,
            "--connect: should be tcp://HOST:PORT or ipc:///PATH, got 'localhost:5800'",
        ),
        ("tcp://localhost:99999", (), ExitCode.CONFIG, "--connect: should be tcp://HOST:PORT"),
        ("tcp://localhost:5800", ("--run-dir", "run"), ExitCode.CONFIG, "give either --connect or --run-dir"),
        ("tcp://localhost:5800", ("--env", "No-v0"), ExitCode.ENV, "environment 'No-v0' cannot be found"),
        ("tcp://localhost:5800", ("--set", "keys.dir=nowhere"), ExitCode.KEYS, "env-host.secret cannot be used"),
    ],
)
def test_an_env_host_with_bad_options_ends_with_an_error(
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


@contextmanager
def pretend_worker(run_dir: Path) -> Iterator[zmq.Socket[bytes]]:
    """A worker of the run, at an address of its own."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as worker:
        worker.linger = 0
        address = f"tcp://127.0.0.1:{worker.bind_to_random_port('tcp://127.0.0.1')}"
        page = FleetFile(fleet_id="f", state="running", endpoints={"envs-1": address})
        page.write(run_dir / "fleet.json")
        yield worker


@pytest.mark.thorough
def test_an_env_host_follows_its_worker_to_a_new_port_and_ends_without_a_worker(tmp_path: Path) -> None:
    config = {"sampling": {"env_placement": "remote"}, "fleet": {"workers": 2, "run_dir": str(tmp_path)}}
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    arguments = ("--slot", "1", "--set", "worker.connect_timeout_s=3")
    with pretend_worker(tmp_path) as first, env_host(tmp_path / "log", tmp_path, *arguments) as process:
        assert first.poll(100_000), "it says HELLO"
        with pretend_worker(tmp_path) as second:
            first.close()
            assert second.poll(100_000), "it says HELLO at the new address"
        assert process.wait(100) == ExitCode.UNREACHABLE
    said = (tmp_path / "log").read_text()
    assert "the worker has moved from tcp://127.0.0.1:" in said
    assert re.search(r"error: no worker answers at tcp://127.0.0.1:\d+ after 3 s", said)
    with env_host(tmp_path / "none", tmp_path, "--slot", "2") as process:
        assert process.wait(100) == ExitCode.RUN_DIR
    assert "its fleet has no worker 2 that takes env hosts" in (tmp_path / "none").read_text()


def test_an_env_host_whose_first_worker_never_comes_ends_at_the_limit(tmp_path: Path, free_port: int) -> None:
    address = f"tcp://127.0.0.1:{free_port}"
    with env_host(tmp_path / "log", address, "--set", "worker.connect_timeout_s=0.5") as process:
        assert process.wait(100) == ExitCode.UNREACHABLE
    assert f"error: no worker answers at {address} after 0.5 s" in (tmp_path / "log").read_text()


def test_an_env_host_logs_why_it_waits_while_no_worker_answers(tmp_path: Path, free_port: int) -> None:
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


def test_a_spare_env_host_moves_to_a_worker_that_lacks_hosts(tmp_path: Path) -> None:
    meet = tmp_path / "meet.json"
    script = "import headrace.workers.envs.remote.host.process as p; p._SPARE_S = 0.2; import headrace.deploy.__main__"
    command = [sys.executable, "-c", script, "env-host", "--rendezvous", str(meet), "--num-envs", "1"]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as first, context.socket(zmq.ROUTER) as second:
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (first, second)]
        at = [Port(address=f"tcp://127.0.0.1:{port}", lacks_hosts=True) for port in ports]
        published = Published(fleet_id="f", endpoints={}, ports={"envs-0": at[0]})
        published.write(meet)
        with (tmp_path / "log").open("wb") as output:
            process = subprocess.Popen([*command], stdout=output, stderr=output)
        try:
            assert first.poll(100_000), "it says HELLO to the only worker"
            route, *_ = first.recv_multipart()
            first.send_multipart([route, *WELCOME.frames()])
            full = at[0].model_copy(update={"lacks_hosts": False})
            published.model_copy(update={"ports": {"envs-0": full, "envs-1": at[1]}}).write(meet)
            assert second.poll(100_000), "it says HELLO to the one that waits"
            assert decode(second.recv_multipart()[1:]).kind is MessageKind.HELLO
        finally:
            process.terminate()
            assert process.wait(100) == 0
    assert f"moving from the worker at tcp://127.0.0.1:{ports[0]} to the one at" in (tmp_path / "log").read_text()
