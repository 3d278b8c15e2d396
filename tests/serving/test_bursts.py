"""Requests of many clients that arrive together: each gets the answer that it would get alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import zmq

from headrace.schemas.frames.wire import MessageKind, WireMessage, decode, encode
from headrace.schemas.peers.socket_folder import SocketPlace
from headrace.workers.envs.remote.router_port import RouterPort
from headrace.workers.serving.serving_messages import ClientHello, EpisodeStart, EpisodeStep
from headrace.workers.serving.single_frame import join_frames, split_frame
from support.serving.plain_episodes import rule
from support.serving.served import Served
from support.waiting import TIMEOUT_S

CLIENTS, ROUNDS = 12, 40


@pytest.fixture
def server() -> Iterator[Served]:
    with Served() as server:
        yield server


class Client:
    """One of many, who says something that is wrong now and then."""

    def __init__(self, context: zmq.Context[Any], server: Served, number: int) -> None:
        self._who = {"session": f"s{number}", "token": "t", "episode": f"e{number}"}
        self._number, self._step = number, 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(server.endpoint)
        self._rng = random.Random(number)
        session = {name: self._who[name] for name in ("session", "token")}
        for request in (ClientHello(**session), EpisodeStart(**self._who)):
            self._say(request.frames())
            assert self.hear().kind in (MessageKind.WELCOME, MessageKind.EPISODE_ANSWER)

    def _say(self, frames: Any) -> None:
        self._socket.send_multipart(join_frames(frames) if self._rng.random() < 0.7 else frames)

    def hear(self) -> WireMessage:
        assert self._socket.poll(100_000), "no answer"
        return decode(split_frame(self._socket.recv_multipart()))

    def close(self) -> None:
        self._socket.close(linger=0)

    def ask(self) -> None:
        self.seen = np.array([self._step, self._number], np.float32)
        self.fault = self._rng.choice(["", "", "", "", "nan", "shape", "dtype", "order", "unknown", "garbage"])
        self.logs = not self.fault and self._rng.random() < 0.2
        header: dict[str, Any] = {**self._who, "request": 7, "step": self._step + (self.fault == "order")}
        arrays: dict[str, Any] = {"obs": self.seen}
        match self.fault:
            case "nan":
                arrays["obs"] = self.seen * np.nan
            case "shape":
                arrays["obs"] = self.seen[:1]
            case "dtype":
                arrays["obs"] = self.seen.astype(np.float64)
            case "unknown":
                header["episode"] = "never begun"
            case "garbage":
                self._say([b"x" * 16, b"y"])
                return
        if self.logs:
            header["off_policy"], arrays["actions"] = True, np.int64(3)
        self._say(encode(EpisodeStep.KIND, header, arrays))

    def check(self, told: WireMessage) -> None:
        wrong = {"nan": "not_in_space", "shape": "not_in_space", "dtype": "not_in_space", "order": "step_order"}
        if self.fault:
            assert told.kind is MessageKind.REJECT
            expected = {**wrong, "unknown": "unknown_episode", "garbage": "bad_request"}[self.fault]
            assert (told.header["error"], told.header["request"]) == (expected, 7 * (self.fault != "garbage"))
            return
        self._step += 1
        assert (told.header["request"], told.header["next_step"]) == (7, self._step)
        assert told.header["episode"] == self._who["episode"]
        if self.logs:
            assert not told.arrays
        else:
            assert told.arrays["actions"].tolist() == rule(self.seen)


def test_many_clients_that_ask_together_each_get_their_own_answer(server: Served) -> None:
    with zmq.Context() as context, ExitStack() as stack:
        clients = [Client(context, server, number) for number in range(CLIENTS)]
        for client in clients:
            stack.callback(client.close)
        for _ in range(ROUNDS):
            for client in clients:
                client.ask()
            for client in clients:
                client.check(client.hear())
    for number, client in enumerate(clients):
        assert server.episodes.episodes[f"e{number}"].seen == [float(step) for step in range(client._step)]


def test_requests_that_one_client_sends_together_are_answered_in_order(server: Served) -> None:
    who = {"session": "s", "token": "t", "episode": "e"}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(server.endpoint)
        said = [ClientHello(session="s", token="t").frames(), EpisodeStart(**who).frames()]
        said += [encode(EpisodeStep.KIND, {**who, "step": 0}, {"obs": np.zeros(2, np.float32)})]
        for frames in said:
            socket.send_multipart(join_frames(frames))
        answers = []
        for _ in said:
            assert socket.poll(100_000)
            answers.append(decode(split_frame(socket.recv_multipart())))
        assert [answer.kind.name for answer in answers] == ["WELCOME", "EPISODE_ANSWER", "EPISODE_ANSWER"]
        assert [answer.header.get("next_step") for answer in answers] == [None, 0, 1]


def test_a_router_port_skips_a_message_whose_first_frame_was_lost(socket_dir: str) -> None:
    router_port = RouterPort(SocketPlace(socket_dir, "clients-0"), None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(router_port.endpoint)
        socket.send(b"lost")
        assert router_port.wait(TIMEOUT_S)
        assert router_port._socket.recv()  # the route; then came Ctrl-C
        assert list(router_port.receive()) == []
        socket.send(b"heard")
        assert router_port.wait(TIMEOUT_S)
        assert [frames for _, frames in router_port.receive()] == [[b"heard"]]
    router_port.close()
