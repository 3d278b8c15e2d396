"""Two threads take turns in running the dispatcher. No request and no answer is lost between them."""

from __future__ import annotations

import random
import threading
import time
import urllib.request

import numpy as np
import zmq

from headrace.schemas.frames.wire import Buffer, WireMessage, decode, encode
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import ClientHello, EpisodeStart, EpisodeStep
from support.serving.plain_episodes import rule
from support.serving.served import Served
from support.waiting import TIMEOUT_S

STEPS = 250


def test_no_answer_is_lost_while_the_sampler_comes_and_goes() -> None:
    rng = random.Random(0)

    def away_s() -> float:
        return rng.choice((0.03, 0.06, 0.12)) if rng.random() < 0.05 else 0.0

    with Served(away_s=away_s) as server:
        threads = [threading.Thread(target=_drive, args=(server.endpoint, f"{number}")) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
        assert not [thread for thread in threads if thread.is_alive()]
        assert [len(episode.actions) for episode in server.episodes.episodes.values()] == [STEPS] * 4


def _drive(endpoint: str, name: str) -> None:
    """A client that asks for nothing twice: an answer that is lost is missing for ever."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)

        def ask(frames: list[Buffer]) -> WireMessage:
            socket.send_multipart(frames)
            assert socket.poll(60_000), f"client {name} was not answered"
            return decode(socket.recv_multipart())

        who = {"session": name, "token": "t"}
        ask(ClientHello(**who).frames())
        ask(EpisodeStart(**who, episode=name).frames())
        for step in range(STEPS):
            seen = np.array([step % 10, int(name)], np.float32)
            header = {**who, "episode": name, "step": step}
            assert ask(encode(EpisodeStep.KIND, header, {"obs": seen})).arrays["actions"] == rule(seen)


def test_health_requests_are_answered_while_the_sampler_is_away() -> None:
    back = threading.Event()
    with Served(away_s=lambda: float(not back.wait(60.0))) as server:
        try:
            with PolicyClient(server.endpoint) as client:
                client.start_episode()
                with urllib.request.urlopen(f"{server.url}/v1/health", timeout=TIMEOUT_S) as answer:
                    assert answer.status == 200
        finally:
            back.set()


def test_run_once_of_a_stopped_dispatcher_does_not_spin() -> None:
    with Served() as server:
        server.dispatcher.stop()
        begun = time.monotonic()
        server.dispatcher.run_once(0.02)
        assert time.monotonic() - begun >= 0.02
