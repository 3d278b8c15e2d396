"""The examples of protocol.md: the test sends each request to a real server and compares the answer."""

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

from headrace.schemas.chunks.chunk import to_episode
from headrace.schemas.errors.episodes import PROBLEMS
from headrace.schemas.errors.serving import HTTP_STATUS
from headrace.schemas.frames.wire import MessageKind, decode, encode
from headrace.workers.serving.single_frame import join_frames, split_frame
from support.serving.served import Served
from support.serving.served_agents import served_agents
from support.waiting import TIMEOUT_S

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


def exchange_by_http(url: str, lines: list[str]) -> None:
    for asked, expected in zip(lines[::2], lines[1::2], strict=True):
        method, path, *body = asked.split(" ", 2)
        request = urllib.request.Request(
            url + path, body[0].encode() if body else None, {"Headrace-Client": "secret-7"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                status, told = answer.status, json.load(answer)
        except urllib.error.HTTPError as refusal:
            with refusal:
                status, told = refusal.code, json.load(refusal)
        assert (status, told) == (int(expected[:3]), json.loads(expected[4:])), asked


def test_every_exchange_by_http_is_as_the_page_says(server: Served) -> None:
    exchange_by_http(server.url, lines_of("http"))
    kept = server.episodes.episodes["walk-1"]
    assert (kept.actions, kept.rewards, kept.infos) == ([9, 41], [0, 0.5, 1.0], [{"slope": 3}])
    assert server.episodes.episodes["walk-2"].end == "fell"


def parse(line: str) -> tuple[MessageKind, dict[str, Any], dict[str, Any]]:
    """KIND {header} name=<dtype values ..."""
    kind, rest = line.split(" ", 1)
    header, end = json.JSONDecoder().raw_decode(rest)
    arrays = re.findall(r"([\w/]+)=([<|]\w\d) ?(\[[^]]*\]|\d+)", rest[end:])
    return MessageKind[kind], header, {name: np.array(json.loads(value), dtype) for name, dtype, value in arrays}


def exchange_by_zeromq(endpoint: str, lines: list[str], *, joined: bool = False) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        for asked, expected in zip(lines[::2], lines[1::2], strict=True):
            frames = encode(*parse(asked))
            socket.send_multipart(join_frames(frames) if joined else frames)
            assert socket.poll(100_000), asked
            answer = socket.recv_multipart()
            assert len(answer) > 1 or joined
            told, (kind, header, arrays) = decode(split_frame(answer)), parse(expected)
            told.header.pop("payload", None)
            assert (told.kind, told.header) == (kind, header), asked
            assert {name: (a.dtype, a.tolist()) for name, a in told.arrays.items()} == {
                name: (a.dtype, a.tolist()) for name, a in arrays.items()
            }


@pytest.mark.parametrize("joined", [False, True])
def test_every_exchange_by_zeromq_is_as_the_page_says(server: Served, joined: bool) -> None:
    exchange_by_zeromq(server.endpoint, lines_of("zmq"), joined=joined)
    assert server.episodes.episodes["run-1"].end == "truncated"


@pytest.mark.parametrize("way", ["http", "zmq"])
def test_every_exchange_of_several_agents_is_as_the_page_says(way: str) -> None:
    with served_agents() as served:
        if way == "http":
            exchange_by_http(served.url, lines_of("http-agents"))
        else:
            exchange_by_zeromq(served.endpoint, lines_of("zmq-agents"))
    whole = {agent: to_episode([c for c in served.chunks if c.agent_id == agent]) for agent in ("red", "blue")}
    assert (whole["red"].actions.tolist(), whole["red"].rewards.tolist()) == ([9, 41, 23], [0.5, 0.0, 1.0])
    assert (whole["blue"].actions.tolist(), whole["blue"].rewards.tolist()) == ([16], [2.0])
    assert (whole["red"].is_truncated, whole["blue"].is_terminated) == (True, True)
    assert whole["red"].columns["off_policy"].tolist() == [False, True, False]


def test_the_page_lists_every_error_code_with_its_status() -> None:
    table = {
        code: int(status)
        for status, codes in re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.M)
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert table == {**HTTP_STATUS, "failed": 500}
    assert set(PROBLEMS) <= set(table)
