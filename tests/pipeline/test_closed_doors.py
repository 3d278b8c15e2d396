"""Two doors are closed: the Unix sockets of a fleet to other users, and TCP with keys to peers without one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from headrace.broker import process as broker_module
from headrace.broker.files.state_file import Endpoints, read_broker_file
from headrace.broker.ports.sockets import receive
from headrace.deploy.run.key_pairs import make_keys
from headrace.learner_stub import EpisodeStream
from headrace.schemas.credentials.keys import CLIENT_PORT, read_broker_keys, read_client_keys
from headrace.schemas.peers.socket_folder import SocketPlace
from headrace.workers.envs.remote.router_port import RouterPort
from support.pipeline.delivery import Envs, StartBroker, StartFeeder, batches_of, broker_process
from support.raw_zmtp import memory_of
from support.waiting import TIMEOUT_S, wait_until

NOBODY = 65_534

# -- Unix sockets, and another user -----------------------------------------------------------------------------------

_STRANGER = """
import os, socket, sys
import zmq
from headrace.learner_stub import EpisodeStream
from headrace.schemas.errors import RunDirError
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
for line in sys.stdin:
    endpoint, said = line.strip(), []
    try:
        EpisodeStream(endpoint)
    except RunDirError as error:
        said.append(str(error).partition(": ")[2].partition(";")[0])
    with socket.socket(socket.AF_UNIX) as plain:
        said.append(plain.connect_ex(endpoint.removeprefix("ipc://")))
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.immediate, dealer.linger = True, 0
        dealer.connect(endpoint)
        said.append(dealer.poll(500, zmq.POLLOUT))
    context.term()
    print(*said, sep=" | ", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_cannot_connect_even_where_the_folder_was_opened(
    stack: ExitStack, start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
    run_dir.chmod(0o755)
    broker = start_broker(run_dir)
    folder = run_dir / "ipc"
    envs = RouterPort(SocketPlace(str(folder), "envs-0"), None)
    stack.callback(envs.close)
    clients = RouterPort(SocketPlace(str(folder), "clients-0"), None, domain=CLIENT_PORT)
    stack.callback(clients.close)
    command = [sys.executable, "-c", _STRANGER, str(NOBODY)]
    stranger = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def tries(endpoint: str) -> list[str]:
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        print(endpoint, file=stranger.stdin, flush=True)
        return stranger.stdout.readline().strip().split(" | ")

    endpoints = [*broker.endpoints.model_dump().values(), envs.endpoint, clients.endpoint]
    foreign = f"it belongs to user 0, and this is user {NOBODY}"
    for endpoint in endpoints:
        Path(endpoint.removeprefix("ipc://")).chmod(0o777)
        assert tries(endpoint) == [foreign, str(errno.EACCES), "0"]
    folder.chmod(0o755)
    for endpoint in endpoints:
        assert tries(endpoint) == [foreign, "0", "0"], "it connects, and is not let in"
    assert stranger.stdin is not None
    stranger.stdin.close()
    folder.chmod(0o700)
    feeder = start_feeder(broker.endpoints.worker, Envs().fragments(5))
    with EpisodeStream(broker.endpoints.learner) as stream:
        assert sum(1 for _ in batches_of(stream, feeder.all_settled)) == 5


# -- TCP, and peers without a key -------------------------------------------------------------------------------------

FLOODERS, FLOOD_BYTES = 200, 10_000_000
MIB = 1 << 20

_FLOOD = """
import struct, sys
from concurrent.futures import ThreadPoolExecutor
from support.raw_zmtp import RawZmtp, frame, knock
endpoint, peers, nbytes, mechanism = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
message = frame(bytes(nbytes), more=False)

def reach():
    if mechanism == "NULL":
        return knock(endpoint)
    peer = RawZmtp(endpoint, mechanism=b"CURVE").sock
    peer.sendall(struct.pack(">BQ", 6, nbytes))  # its first command, of any size
    return peer

def flood(_):
    try:
        with reach() as peer:
            peer.settimeout(30)
            peer.sendall(message)
            while peer.recv(1 << 16):  # a fast machine sends all before the broker looks
                pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True

with ThreadPoolExecutor(50) as pool:
    print(sum(pool.map(flood, range(peers))))
"""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    make_keys(folder)
    return folder


def flood(
    endpoint: str, peers: int = FLOODERS, nbytes: int = FLOOD_BYTES, mechanism: str = "NULL"
) -> subprocess.Popen[str]:
    """Start peers without a key, each on its own connection. It prints how many connections were ended."""
    command = [sys.executable, "-c", _FLOOD, endpoint, str(peers), str(nbytes), mechanism]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("mechanism", "most", "why"),
    [("NULL", 6 * MIB, "a peer that showed no key"), ("CURVE", 256 * MIB, "bytes before it has shown a key")],
)
def test_floods_without_a_key_cost_the_broker_no_memory_while_a_keyed_worker_delivers(
    mechanism: str,
    most: int,
    why: str,
    keys: Path,
    tmp_path: Path,
    start_feeder: StartFeeder,
    stack: ExitStack,
) -> None:
    process = stack.enter_context(broker_process(tmp_path, keys=keys))
    state = read_broker_file(tmp_path)
    assert state is not None
    envs, flooding = Envs(), list[subprocess.Popen[str]]()

    def batches() -> Iterator[object]:
        yield envs.fragment()
        while not flooding or any(flooder.poll() is None for flooder in flooding):
            yield envs.fragment()

    feeder = start_feeder(state.endpoints.worker, batches(), keys=read_client_keys(keys, "worker"))
    stream = stack.enter_context(EpisodeStream(state.endpoints.learner, keys=keys, connect_timeout_s=TIMEOUT_S))
    delivered = batches_of(stream, feeder.all_settled)
    for _ in range(100):
        next(delivered)
    Path(f"/proc/{process.popen.pid}/clear_refs").write_text("5")  # begin VmHWM again
    before = memory_of(process.popen.pid)
    flooding += [
        stack.enter_context(flood(endpoint, mechanism=mechanism)) for endpoint in state.endpoints.model_dump().values()
    ]
    assert sum(1 for _ in delivered) > 10
    grown = memory_of(process.popen.pid, "VmHWM") - before
    assert grown < most
    done = [int(flooder.communicate()[0]) for flooder in flooding]
    assert done == [FLOODERS] * 3
    assert feeder.error is None
    assert stream.delivered == len(feeder.steps)
    log = process.log.read_text()
    for role in Endpoints.model_fields:
        assert f"at the {role} port: " in log
    assert why in log


def test_no_message_of_a_peer_without_a_key_reaches_python(
    keys: Path, start_broker: StartBroker, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = list[object]()

    def note(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
        message = receive(socket)  # type: ignore[arg-type]
        heard.extend([message] if message is not None else [])
        return message

    monkeypatch.setattr(broker_module, "receive", note)
    broker = start_broker(keys=read_broker_keys(keys))
    for endpoint in (broker.endpoints.worker, broker.endpoints.learner):
        with flood(endpoint, 20, 1000) as flooder:
            assert flooder.wait(TIMEOUT_S) == 0
    refused = broker.broker.sockets.auth.refused
    wait_until(lambda: sum(refused.values()) == 40, "the refusals")
    assert not heard
    start_feeder(broker.endpoints.worker, keys=read_client_keys(keys, "worker"))
    wait_until(lambda: heard, "a message of a worker with a key")
