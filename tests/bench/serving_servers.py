"""The servers of the serving bench: a policy server, and bare ones that do only the minimum."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import torch
import zmq
from numpy.typing import NDArray

from bench.processes import until_terminated
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.settings.serving_settings import ServingSection
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.modules import actor_critic


def serve(folder: str, http_port: int | None, places: int) -> None:
    """Run a runner as in a worker and drop its samples. It serves HTTP if it gets a port for it.

    Its Unix socket is `clients-0` in `folder`, or for "" in a folder of its own.
    """
    from headrace.workers.serving.served_env import ServedEnvs

    creator = ServedEnvs(ServingSection(enabled=True, http_port=http_port), "CartPole-v1", "", socket_dir=folder)
    config = EnvRunnerConfig(env=creator, num_envs=places, seed=0, external_fragment_max_age_s=0.5)
    stopping, sampler = until_terminated(), SingleAgentEnvRunner(config)
    while not stopping.is_set():
        sampler.sample_fragment()
    sampler.stop()


def echo(endpoint: str) -> None:
    """Serve the same policy behind a bare ROUTER."""
    act, stopping = _policy(), until_terminated()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(endpoint)
        while not stopping.is_set():
            if not router.poll(100):
                continue
            asked = _all_of(router)
            rows = np.frombuffer(b"".join(frames[2] for frames in asked), np.float32).reshape(-1, 4)
            for frames, action in zip(asked, act(rows), strict=True):
                router.send_multipart([frames[0], b"", action.tobytes()])


def echo_http(port: int) -> None:
    """Serve the same policy behind uvicorn with its fastest settings."""
    import uvicorn

    app, stopping = Acting(), until_terminated()
    config = uvicorn.Config(
        app, port=port, http="httptools", loop="asyncio", ws="none", lifespan="off", log_config=None
    )
    config.timeout_keep_alive = 3600  # connections stay while others have their turn
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    stopping.wait()
    server.should_exit = True
    thread.join()


class Acting:
    """An ASGI application that acts for all waiting requests at once."""

    def __init__(self) -> None:
        self._act = _policy()
        self._asked: list[tuple[list[float], asyncio.Future[int]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await _body(receive)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        if not self._asked:
            loop.call_soon(self._answer)
        self._asked.append((orjson.loads(body).get("observation", [0.0] * 4), answer))
        told = orjson.dumps({"action": await answer})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(told))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": told})

    def _answer(self) -> None:
        asked, self._asked = self._asked, []
        actions = self._act(np.array([row for row, _ in asked], np.float32))
        for (_, answer), action in zip(asked, actions.tolist(), strict=True):
            answer.set_result(action)


async def _body(receive: Any) -> bytes:
    found, more = b"", True
    while more:
        message = await receive()
        found, more = found + message["body"], message["more_body"]
    return found


def _policy() -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return actions for rows of observations."""
    torch.set_num_threads(1)
    module = actor_critic(Spaces(observation=Box(shape=(4,), dtype="<f4"), action=Discrete(n=2)))
    act, rng = module.numpy_act(), np.random.default_rng(0)
    return lambda rows: act({"obs": rows}, rng.random((len(rows), module.noise_size), np.float32))["actions"]


def _all_of(router: zmq.Socket[bytes]) -> list[list[bytes]]:
    found = []
    while True:
        try:
            found.append(router.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return found
