"""What the protocol's page says is what the server does: each of its examples is sent, and each answer compared."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from served import Served

from headrace.schemas.episode_errors import EpisodeError
from headrace.schemas.serving_errors import HTTP_STATUS, ServingError
from headrace.schemas.wire import MessageKind, decode, encode

PAGE = (Path(__file__).parents[2] / "workers" / "serving" / "protocol.md").read_text()


@pytest.fixture
def server() -> Iterator[Served]:
    with Served() as served:
        yield served


def lines_of(language: str) -> list[str]:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert lines
    assert len(lines) % 2 == 0
    return lines


def test_every_exchange_by_http_is_as_the_page_says(server: Served) -> None:
    lines = lines_of("http")
    for asked, expected in zip(lines[::2], lines[1::2], strict=True):
        method, path, *body = asked.split(" ", 2)
        request = urllib.request.Request(
            server.url + path, body[0].encode() if body else None, {"Headrace-Client": "secret-7"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                status, told = answer.status, json.load(answer)
        except urllib.error.HTTPError as refusal:
            with refusal:
                status, told = refusal.code, json.load(refusal)
        assert (status, told) == (int(expected[:3]), json.loads(expected[4:])), asked
    kept = server.episodes.episodes["walk-1"]
    assert (kept.actions, kept.rewards, kept.infos) == ([9, 41], [0, 0.5, 1.0], [{"slope": 3}])
    assert server.episodes.episodes["walk-2"].end == "fell"


def parse(line: str) -> tuple[MessageKind, dict[str, Any], dict[str, Any]]:
    """KIND {header} name=<dtype values ..."""
    kind, rest = line.split(" ", 1)
    header, end = json.JSONDecoder().raw_decode(rest)
    arrays = re.findall(r"(\w+)=([<|]\w\d) ?(\[[^]]*\]|\d+)", rest[end:])
    return MessageKind[kind], header, {name: np.array(json.loads(value), dtype) for name, dtype, value in arrays}


def test_every_exchange_by_zeromq_is_as_the_page_says(server: Served) -> None:
    lines = lines_of("zmq")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.endpoint)
        for asked, expected in zip(lines[::2], lines[1::2], strict=True):
            socket.send_multipart(encode(*parse(asked)))
            assert socket.poll(10_000), asked
            told, (kind, header, arrays) = decode(socket.recv_multipart()), parse(expected)
            told.header.pop("payload", None)
            assert (told.kind, told.header) == (kind, header), asked
            assert {name: (a.dtype, a.tolist()) for name, a in told.arrays.items()} == {
                name: (a.dtype, a.tolist()) for name, a in arrays.items()
            }
    assert server.episodes.episodes["run-1"].end == "truncated"


def test_the_page_tells_every_code_and_its_status() -> None:
    table = {
        code: int(status)
        for status, codes in re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.M)
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert table == {**HTTP_STATUS, "failed": 500}
    codes = {cls.code for root in (ServingError, EpisodeError) for cls in root.__subclasses__()}
    assert codes <= set(table)
