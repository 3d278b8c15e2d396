"""A worker's Unix socket: one server at a time, a killed server blocks no later one, and frames are bounded."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from headrace.schemas.errors import PortInUseError
from headrace.schemas.peers.socket_folder import SocketPlace, make_socket_folder, remove_socket_folder
from headrace.workers.envs.remote.router_port import RouterPort
from support.raw_zmtp import RawZmtp, head
from support.socket_folders import socket_folder
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def folder() -> Iterator[Path]:
    with socket_folder() as made:
        yield made


def serve(folder: Path, name: str = "envs-0") -> RouterPort:
    return RouterPort(SocketPlace(str(folder), name), None)


def hears(server: RouterPort) -> bool:
    """Return whether a message of a new peer reaches the server."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(server.endpoint)
        peer.send(b"hello")
        return server.wait(TIMEOUT_S) and [frames for _, frames in server.receive()] == [[b"hello"]]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    begin = "import os, signal, sys\nfrom headrace.workers.envs.remote.router_port import RouterPort, SocketPlace\n"
    return subprocess.run([sys.executable, "-c", begin + code, *arguments], capture_output=True, text=True, check=False)


def test_a_second_server_at_a_socket_is_refused_and_the_first_keeps_it(folder: Path) -> None:
    with closing(serve(folder)) as first:
        for _ in range(2):
            with pytest.raises(PortInUseError, match=f"{folder}/envs-0 is already"):
                serve(folder)
        assert hears(first)
        with closing(serve(folder, "envs-1")) as other:
            assert hears(other)
    assert not (folder / "envs-0").exists()
    with closing(serve(folder)) as later:
        assert hears(later)


def test_the_next_server_replaces_the_socket_of_a_killed_one(folder: Path) -> None:
    code = "port = RouterPort(SocketPlace(sys.argv[1], 'envs-0'), None); os.kill(os.getpid(), signal.SIGKILL)"
    killed = run(code, str(folder))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert stat.S_ISSOCK((folder / "envs-0").stat().st_mode), "it leaves its socket"
    with closing(serve(folder)) as later:
        assert hears(later)


def test_a_run_with_a_long_path_leaves_no_folder_unless_a_server_is_there(tmp_path: Path) -> None:
    run_dir = tmp_path / ("long" * 30)
    with closing(serve(made := make_socket_folder(run_dir))):
        remove_socket_folder(run_dir)
        assert made.is_dir()
    remove_socket_folder(run_dir)
    assert not made.exists()
    assert list(run_dir.iterdir()) == []
    assert (again := make_socket_folder(run_dir)).is_dir()
    remove_socket_folder(run_dir)
    assert not again.exists()
    (short := tmp_path / "ipc").mkdir()
    remove_socket_folder(tmp_path)
    assert short.is_dir()


def test_a_copy_by_fork_leaves_the_folder_of_its_parent(folder: Path) -> None:
    code = """
place = SocketPlace("", "envs-0")
child = os.fork()
if not child:
    del place
    sys.exit()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(place.folder, place.folder.exists())
"""
    found, is_there = run(code).stdout.split()
    assert is_there == "True"
    assert not Path(found).exists(), "it ends with the program"


def test_a_frame_too_large_ends_its_connection_alone(folder: Path) -> None:
    with closing(serve(folder)) as port, RawZmtp(port.endpoint) as huge, RawZmtp(port.endpoint) as other:
        huge.send(head(300 << 20, more=False))
        wait_until(huge.is_cut, "the end of its connection")
        assert not other.is_cut()
