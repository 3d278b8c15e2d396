"""A broken handshake: refused keys if the server never let the client in, an unreachable server if it did."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.schemas.errors import KeysRefusedError, UnreachableError
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import ClientHeartbeat
from support.serving.served import Served


@contextmanager
def breaking_off(port: int) -> Iterator[None]:
    """Takes connections at `port`, and closes each."""
    with socket.create_server(("127.0.0.1", port)) as listener:

        def run() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=run)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.long
def test_a_broken_handshake_means_refused_keys_only_before_a_first_welcome(free_port: int) -> None:
    with breaking_off(free_port), pytest.raises(KeysRefusedError, match="refuses peers without keys"):
        PolicyClient(f"tcp://127.0.0.1:{free_port}", connect_timeout_s=1.0)
    with Served(port=free_port) as served:
        client = PolicyClient(served.endpoint)
    with breaking_off(free_port), pytest.raises(UnreachableError, match="no policy server answers"):
        client.ask(ClientHeartbeat, timeout_s=1.0)
    client.close()
