"""A ROUTER port holds so many unread messages of one peer. The peer keeps further ones, and none is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from headrace.broker.sockets import BrokerSockets
from headrace.schemas.peers.sockets import MOST_UNREAD
from headrace.schemas.settings.config import BrokerSection
from headrace.workers.envs.remote.router_port import RouterPort, RouterPortSettings

Socket = zmq.Socket[bytes]


@contextmanager
def ports_of_a_broker(run_dir: Path) -> Iterator[list[Socket]]:
    found = BrokerSockets(BrokerSection(), run_dir, None, None)
    try:
        yield [found.workers, found.learners]
    finally:
        found.close()


@contextmanager
def port_of_a_worker(run_dir: Path) -> Iterator[list[Socket]]:
    port = RouterPort(RouterPortSettings("127.0.0.1", 0, None))
    try:
        yield [port._socket]
    finally:
        port.close()


@pytest.mark.parametrize("ports", [ports_of_a_broker, port_of_a_worker])
def test_a_peer_waits_until_the_port_has_read(
    tmp_path: Path, ports: Callable[[Path], AbstractContextManager[list[Socket]]]
) -> None:
    with ports(tmp_path) as sockets:
        for number, socket in enumerate(sockets):
            endpoint = f"inproc://{number}"  # a connection without buffers of the kernel
            socket.bind(endpoint)
            with socket.context.socket(zmq.DEALER) as peer:
                peer.set(zmq.SNDHWM, 1)
                peer.set(zmq.LINGER, 0)
                peer.connect(endpoint)
                sent = 0
                with suppress(zmq.Again):
                    while sent < 4 * MOST_UNREAD:
                        peer.send(b"%d" % sent, zmq.DONTWAIT)
                        sent += 1
                assert sent == MOST_UNREAD + 1
                read = [socket.recv_multipart()[-1] for _ in range(sent)]
            assert read == [b"%d" % n for n in range(sent)]
