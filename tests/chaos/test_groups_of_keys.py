"""A fleet with keys, a worker of a second group from elsewhere, and a stranger who has that group's key."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.key_pairs import add_key, make_keys
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.credentials.keys import ClientKeys, read_client_keys
from headrace.schemas.errors import ExitCode
from headrace.schemas.frames.wire import MessageKind, decode_header
from headrace.schemas.messages import Message, Obituary, Reject, SupervisorHello, WorkerHello, WorkerWelcome, read
from headrace.schemas.peers import sockets
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.chaos


class Stranger:
    """A bare socket with a key of the group, which says what it likes."""

    def __init__(self, endpoint: str, keys: ClientKeys) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for name, value in (sockets.DEALER | keys.options()).items():
            self._socket.setsockopt(getattr(zmq, name), value)
        self._monitor = self._socket.get_monitor_socket(zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.DISCONNECTED)
        self._socket.connect(endpoint)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def ask(self, message: Message) -> Reject | WorkerWelcome:
        """The broker's first refusal or welcome; acknowledgements of a slot of its own are left out."""
        if not self._socket.poll(1000 * TIMEOUT_S, zmq.POLLOUT):
            raise AssertionError("the broker does not let the stranger in")
        self._socket.send_multipart(message.frames())
        while self._socket.poll(1000 * TIMEOUT_S):
            kind, header = decode_header(self._socket.recv_multipart())
            if kind in (MessageKind.REJECT, MessageKind.WELCOME):
                return read(Reject, header) if kind is MessageKind.REJECT else read(WorkerWelcome, header)
        raise AssertionError(f"no answer to {type(message).__name__}")

    def events(self) -> set[zmq.Event]:
        found = set()
        while self._monitor.poll(0):
            found.add(zmq.Event(int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")))
        return found


def headrace(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.deploy", *arguments]


@pytest.mark.thorough
def test_a_strangers_key_speaks_for_no_life_of_another_and_can_be_revoked(tmp_path: Path) -> None:
    keys, elsewhere = tmp_path / "keys", tmp_path / "elsewhere"
    make_keys(keys)
    add_key(keys, "worker", "gpu")
    elsewhere.mkdir(mode=0o700)
    for name in ("worker.gpu.secret", "broker.public"):
        (elsewhere / name).write_bytes((keys / name).read_bytes())
        (elsewhere / name).chmod(0o600)
    run = ("--workers", "1", "--num-envs", "2", "--listen", "127.0.0.1", "--set", f"keys.dir={keys}")
    with RunningFleet(tmp_path / "run", *run) as fleet, ExitStack() as stack:
        fleet.wait_until(lambda: accepted(fleet, 0), "the fleet's own worker delivers")
        fleet_id = read_fleet_file(tmp_path / "run" / "fleet.json").fleet_id
        join = ("--endpoint", fleet.endpoint("worker"), "--fleet-id", fleet_id, "--num-envs", "2")
        where = ("--run-dir", str(tmp_path / "w"), "--set", f"keys.dir={elsewhere}")
        words = stack.enter_context((tmp_path / "worker.log").open("w"))
        worker = stack.enter_context(subprocess.Popen(headrace("worker", *join, *where), stderr=words))
        stack.callback(lambda: worker.poll() is None and worker.kill())
        fleet.wait_until(lambda: accepted(fleet, 1000), "a worker of the second group delivers")

        stranger = stack.enter_context(Stranger(fleet.endpoint("worker"), read_client_keys(elsewhere, "worker")))
        assert attack(stranger, fleet_id) == ["slot_taken", "wrong_role", "unknown_peer"]
        before = accepted(fleet, 0)
        fleet.wait_until(lambda: accepted(fleet, 0) > before, "the attacked worker goes on")

        revoke = headrace("keys", "revoke", "worker", "--group", "gpu", "--dir", str(keys))
        assert subprocess.run(revoke, check=False, timeout=TIMEOUT_S).returncode == 0
        assert worker.wait(TIMEOUT_S) == ExitCode.KEYS
        said = " ".join((tmp_path / "worker.log").read_text().split())
        assert "the worker.gpu key" in said
        assert "is revoked; it must stop" in said
        wait_until(lambda: zmq.Event.DISCONNECTED in stranger.events(), "the end of the stranger's connection")
        again = stack.enter_context(Stranger(fleet.endpoint("worker"), read_client_keys(elsewhere, "worker")))
        wait_until(lambda: zmq.Event.HANDSHAKE_FAILED_AUTH in again.events(), "the refusal of a new connection")
        before = accepted(fleet, 0)
        fleet.wait_until(lambda: accepted(fleet, 0) > before, "the rest goes on")
        fleet.terminate()
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert not any(result["restarts"].values())
    audit = fleet.audited()
    assert {row["incarnation"] for row in audit["rows"] if row["slot"] == 0} == {1}
    assert "refused at the worker port: a revoked key" in (tmp_path / "run" / "logs" / "broker.log").read_text()


def attack(stranger: Stranger, fleet_id: str) -> list[str]:
    """What the broker says to a claim of the fleet's own life, to a supervisor with a worker's key, and its news."""
    life: dict[str, Any] = {"slot": 0, "incarnation": 1}
    dead = Obituary(slot=0, incarnation=1, totals=WorkerTotals(), settled=Settled(), reason="worker_killed")
    answers = [
        stranger.ask(WorkerHello(fleet_id=fleet_id, token="x", **life)),
        stranger.ask(SupervisorHello(fleet_id=fleet_id, token="x")),
        stranger.ask(dead),
    ]
    return [answer.code if isinstance(answer, Reject) else "welcome" for answer in answers]


def accepted(fleet: RunningFleet, slot: int) -> int:
    """Steps that the broker has accepted of the slot's first life, as Redis has them."""
    snapshot = fleet.snapshot()
    row = snapshot.rows.get((slot, 1)) if snapshot else None
    return row.accepted[0] if row is not None else 0
