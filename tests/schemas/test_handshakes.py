"""The log and the last error name a server that breaks off each handshake."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from headrace.schemas.credentials.keys import ClientKeys
from headrace.schemas.errors import KeysRefusedError, UnreachableError
from headrace.schemas.peers.handshakes import BROKEN_OFF, SUCCEEDED, Handshakes


def event(kind: int) -> list[bytes]:
    return [struct.pack("=HI", kind, 0), b"tcp://10.0.0.1:5"]


def handshakes() -> Handshakes:
    key = b"a" * 40
    return Handshakes("tcp://10.0.0.1:5", "worker", ClientKeys("worker", key, key, key, Path("keys")))


def test_handshakes_that_are_broken_off_are_told_again_while_they_go_on(caplog: pytest.LogCaptureFixture) -> None:
    ours = handshakes()
    for _ in range(800):
        ours.observe(event(BROKEN_OFF))
    assert [line.split(" so far")[0].split("(")[1] for line in caplog.messages] == ["3", "48", "768"]
    assert all("another key than that in keys/broker.public" in line for line in caplog.messages)


def test_the_error_names_the_key_also_where_the_broker_let_this_peer_in_before() -> None:
    ours = handshakes()
    ours.observe(event(SUCCEEDED))
    assert "another key" not in str(ours.why_silent(60.0))
    for _ in range(3):
        ours.observe(event(BROKEN_OFF))
    error = ours.why_silent(60.0)
    assert isinstance(error, UnreachableError)
    assert "no broker answers at tcp://10.0.0.1:5 after 60 s; it breaks off each handshake" in str(error)
    assert "copy the right key" in str(error)


def test_a_broker_that_never_let_this_peer_in_refuses_its_key() -> None:
    ours = handshakes()
    ours.observe(event(BROKEN_OFF))
    assert isinstance(ours.why_silent(60.0), KeysRefusedError)
