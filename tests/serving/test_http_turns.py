"""The thread that runs the dispatcher's loop serves both HTTP and ZeroMQ, whichever thread that is."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zmq

from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import ClientHeartbeat, ClientHello
from support.serving.http_sampler import STEPS, drive, sample_until, sampler
from support.serving.plain_episodes import rule
from support.serving.raw_http import HEALTH, RawHttp, put
from support.serving.served import Served
from support.waiting import TIMEOUT_S, wait_until


def test_http_has_no_thread_of_its_own_and_leaves_signals_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with sampler() as (runner, url), ThreadPoolExecutor(1, thread_name_prefix="client") as pool:
        asked = pool.submit(drive, url, "a")
        runner.sample_fragment()
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        names = {thread.name for thread in threading.enumerate()}
        assert not {name for name in names if name.startswith(("http", "asyncio"))}, names
        sample_until(runner, asked)


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["alone", "inside_a_loop"])
def test_the_server_goes_on_after_ctrl_c_in_a_waiting_sampler(where: str) -> None:
    """The test uses a separate process: after property tests, the garbage collector may swallow a Ctrl-C."""
    script = f"from support.serving import http_sampler as here; here.press_ctrl_c(here.{where})"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=TIMEOUT_S)


def test_neither_http_nor_zeromq_starves_the_other() -> None:
    with Served() as server, ThreadPoolExecutor(4) as pool, zmq.Context() as context:
        flooding = threading.Event()

        def flood(name: str) -> None:
            who = {"session": name, "token": "t"}
            with context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.connect(server.endpoint)
                socket.send_multipart(ClientHello(**who).frames())
                while not flooding.is_set():
                    for _ in range(100):
                        socket.send_multipart(ClientHeartbeat(**who).frames())
                    for _ in range(100):
                        socket.recv_multipart()

        def crowd(name: str) -> None:
            with RawHttp(server.url) as client:
                while not flooding.is_set():
                    client.say(HEALTH * 50)
                    for _ in range(50):
                        client.hear()

        floods = [pool.submit(flood, "f"), pool.submit(flood, "g"), pool.submit(crowd, "h")]
        try:
            assert drive(server.url, "own", "[3, 1]") == [rule([3, 1])] * STEPS
            with PolicyClient(server.endpoint) as client:
                episode = client.start_episode()
                for _ in range(STEPS):
                    assert client.get_action(episode, np.array([4, 2], np.float32)) == rule([4, 2])
        finally:
            flooding.set()
        for one in floods:
            one.result(100)


def test_pipelined_http_requests_are_answered_in_order() -> None:
    with Served() as server, RawHttp(server.url) as client:
        episode = "/v1/sessions/s/episodes/e"
        steps = [put(f"{episode}/steps/{n}", b'{"observation": [%d, 0]}' % n) for n in range(3)]
        beat = put("/v1/sessions/s/heartbeat").replace(b"PUT", b"POST", 1)
        client.say(
            b"".join([put("/v1/sessions/s"), put(episode), steps[0], steps[1], beat, steps[1], HEALTH, steps[2]])
        )
        bodies = [client.hear().body for _ in range(8)]
        assert [body.get("action") for body in bodies] == [None, None, 0, 7, None, 7, None, 14]


@pytest.mark.parametrize("next_", ["another step", "its health"])
def test_a_stopping_server_answers_every_waiting_http_request(next_: str) -> None:
    server = Served()
    try:
        server.hold.set()
        client = RawHttp(server.url)
        for path in ("/v1/sessions/s", "/v1/sessions/s/episodes/e"):
            client.say(put(path))
            assert client.hear().status == 200
        steps = [put(f"/v1/sessions/s/episodes/e/steps/{n}", b'{"observation": [1, 2]}') for n in range(2)]
        client.say(steps[0] + (steps[1] + HEALTH if next_ == "another step" else HEALTH + steps[1]))
        wait_until(lambda: server.episodes.waiting, what="the step")
    finally:
        server.close()
    with client:
        told = [client.hear() for _ in range(3)]
        assert [(one.status, one.body["error"]) for one in told] == [(410, "aborted"), *[(503, "not_yet")] * 2]
        client.hear_end()
