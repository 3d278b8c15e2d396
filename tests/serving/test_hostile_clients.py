"""Thousands of random requests over ZeroMQ and HTTP: the server answers each, and a refusal names its error."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import zmq

from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors.serving import HTTP_STATUS
from headrace.schemas.frames.wire import decode, encode
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import ANSWERS
from headrace.workers.serving.single_frame import join_frames, split_frame
from support.serving.hostile_requests import Hostile, codes_by_http
from support.serving.other_client import somebody_else
from support.serving.plain_episodes import rule
from support.serving.served import LIMITS, Served

pytestmark = pytest.mark.long

MESSAGES = 3000


@pytest.mark.parametrize("seed", [1, 2])
def test_random_messages_get_an_answer_or_a_named_error(seed: int) -> None:
    hostile, told = Hostile(seed, "own-session"), Counter[str]()
    with Served() as server, somebody_else(server) as go_on, zmq.Context() as context:
        with context.socket(zmq.DEALER) as sock:
            sock.linger = 0
            sock.connect(server.endpoint)
            for number in range(MESSAGES // 2):
                kind, header, arrays = hostile.message()
                frames = encode(kind, header, arrays)
                sock.send_multipart(join_frames(frames) if seed == 1 else frames)
                assert sock.poll(100_000), f"no answer to {kind.name} {header}"
                answer = decode(split_frame(sock.recv_multipart()))
                assert answer.kind in ANSWERS
                hostile.heard(answer.header)
                told[answer.header.get("error", "")] += 1
                if number % 100 == 0:
                    go_on()
        assert threading.active_count() < 12
    assert set(told) <= {"", *HTTP_STATUS}
    assert min(told[code] for code in ("", "bad_request", "not_in_space", "unknown_episode", "step_order")) > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_random_json_gets_an_answer_or_a_named_error(seed: int) -> None:
    with Served() as server, somebody_else(server) as go_on:
        told = codes_by_http(Hostile(seed, "own-session"), server.url, MESSAGES // 2, go_on)
    assert set(told) <= {"", *HTTP_STATUS}
    assert min(told[code] for code in ("", "bad_request", "not_in_space", "unknown_episode", "step_order")) > 0


def test_a_message_nearly_as_large_as_the_cap_is_taken() -> None:
    with Served() as server, PolicyClient(server.endpoint) as client:
        episode = client.start_episode()
        for step, size in enumerate((0, 1 << 15, LIMITS.max_message_bytes - 1024, 0)):
            if step:
                client.log_returns(episode, 1.0, {"text": "x" * size})
            assert client.get_action(episode, [step, 1]) == rule([step, 1])
        client.end_episode(episode, [9, 1])
    assert [len(info["text"]) for info in server.episodes.episodes[episode].infos] == [1 << 15, 65536 - 1024, 0]


def test_an_observation_of_more_than_99999999_bytes_is_one_step() -> None:
    """The reference loses its place in the stream here: its header has eight decimal digits for the length."""
    spaces = Spaces(observation=Box(shape=(12_500_001,), dtype="<f8"), action=Discrete(n=1000))
    limits = replace(LIMITS, max_message_bytes=1 << 27)
    with Served(limits, spaces=spaces) as server, PolicyClient(server.endpoint) as client:
        episode, seen = client.start_episode(), np.zeros(12_500_001)
        for step in range(2):
            seen[1] = step
            assert client.get_action(episode, seen) == step
        client.abort_episode(episode)
    assert server.episodes.episodes[episode].actions == [0, 1]
