"""Peers that wait until a broker's port admits them: who waits, who does not, and what costs a place."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.deploy.run.key_pairs import make_keys
from headrace.learner_stub import EpisodeStream
from headrace.schemas.credentials.keys import ClientKeys, read_broker_keys, read_client_keys
from headrace.schemas.errors import KeysRefusedError
from headrace.schemas.peers.port_watch import PortWatch
from support.pipeline.delivery import BrokerThread, Feeder, StartBroker
from support.raw_zmtp import RawZmtp, knock
from support.waiting import TIMEOUT_S, wait_until


class Places:
    """Stands in for the admission of a port: it has no places but those that a test gives."""

    def __init__(self, broker: BrokerThread, role: str) -> None:
        self._left, self._role, self._broker = 0, role, broker
        self.watch: PortWatch = broker.ask(lambda asked: asked.sockets.watches[getattr(asked.sockets, f"{role}s")])
        self.watch.admission.places = self._places  # type: ignore[method-assign]

    def _places(self, *, waits: bool) -> int:
        left, self._left = self._left, 0
        return left

    def give(self, count: int) -> None:
        self._left = count

    def waiting(self) -> int:
        return self._broker.ask(lambda asked: len(asked.sockets.auth._waiting[self._role]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Keys of the fleet, and of another fleet with the same broker's public key, so that handshakes get far."""
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    make_keys(ours)
    make_keys(theirs)
    (theirs / "broker.public").write_bytes((ours / "broker.public").read_bytes())
    return ours, theirs


def worker_keys(folder: Path) -> ClientKeys:
    return read_client_keys(folder, "worker")


def test_peers_that_have_given_up_cost_a_newcomer_no_place(start_broker: StartBroker) -> None:
    broker, admitted = start_broker(allow_insecure=True), list[RawZmtp]()
    places = Places(broker, "worker")
    gone = [knock(broker.endpoints.worker) for _ in range(20)]
    wait_until(lambda: places.waiting() == 20, "the requests")
    for sock in gone:
        sock.close()
    wait_until(lambda: not places.watch._connections, "the end of their connections")
    connecting = threading.Thread(target=lambda: admitted.append(RawZmtp(broker.endpoints.worker)))
    connecting.start()
    wait_until(lambda: places.waiting() == 21, "the newcomer's request")
    places.give(1)
    connecting.join(TIMEOUT_S)
    with admitted.pop():
        assert not places.waiting()


def test_a_port_that_admits_nobody_now_delays_no_peer_of_another_port(start_broker: StartBroker) -> None:
    broker = start_broker(allow_insecure=True)
    places = Places(broker, "worker")
    with knock(broker.endpoints.worker):
        wait_until(places.waiting, "the request")
        with EpisodeStream(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S) as stream:
            assert stream.epoch == 1
        assert places.waiting()


def test_peers_with_unknown_keys_are_refused_at_once_and_take_no_place(
    start_broker: StartBroker, folders: tuple[Path, Path]
) -> None:
    ours, theirs = folders
    broker = start_broker(keys=read_broker_keys(ours))
    places = Places(broker, "worker")
    with ExitStack() as stack:
        known = stack.enter_context(Feeder(broker.endpoints.worker, keys=worker_keys(ours), slot=1))
        wait_until(lambda: places.waiting() == 1, "the request of the peer with a known key")
        for slot in range(2, 6):
            stranger = stack.enter_context(Feeder(broker.endpoints.worker, keys=worker_keys(theirs), slot=slot))
            wait_until(lambda: stranger.error is not None, "its refusal, although the port admits nobody")  # noqa: B023
            assert isinstance(stranger.error, KeysRefusedError)
        assert places.waiting() == 1
        places.give(1)
        wait_until(lambda: broker.ask(lambda asked: asked.core.live()), "the worker with a known key")
        assert known.error is None
