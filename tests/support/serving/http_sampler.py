"""A runner that serves by HTTP, episodes that are driven there, and Ctrl-C while nothing asks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from headrace.schemas.settings.serving_settings import ServingSection
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.serving.served_env import ServedEnv, ServedEnvs
from support.serving.raw_http import RawHttp, put

STEPS = 50


def drive(url: str, name: str, observation: str = "[0, 0, 0, 0]", steps: int = STEPS) -> list[int]:
    """An episode by HTTP on one connection; what was done."""
    session, done = f"/v1/sessions/{name}", []
    with RawHttp(url) as client:
        for path in (session, f"{session}/episodes/{name}"):
            client.say(put(path))
            assert client.hear().status == 200
        for step in range(steps):
            client.say(put(f"{session}/episodes/{name}/steps/{step}", f'{{"observation": {observation}}}'.encode()))
            told = client.hear()
            assert told.status == 200, told
            done.append(told.body["action"])
    return done


@contextmanager
def sampler() -> Iterator[tuple[SingleAgentEnvRunner, str]]:
    """One that nobody has turn yet, and its url."""
    creator = ServedEnvs(ServingSection(enabled=True, http_port=0, lease_s=5.0), "CartPole-v1", "")
    runner = SingleAgentEnvRunner(EnvRunnerConfig(env=creator, num_envs=4, external_fragment_max_age_s=0.1))
    try:
        env = runner.env
        assert isinstance(env, ServedEnv)
        yield runner, env.url
    finally:
        runner.stop()


def sample_until(runner: SingleAgentEnvRunner, asked: Future[list[int]]) -> None:
    while not asked.done():
        runner.sample_fragment()
    assert len(asked.result()) == STEPS


def sample_until_pressed(runner: SingleAgentEnvRunner, pressed: threading.Timer) -> None:
    pressed.start()
    while True:
        runner.sample_fragment()


def inside_a_loop(call: Callable[..., None], *args: object) -> None:
    async def within() -> None:
        call(*args)

    loop = asyncio.new_event_loop()  # not by `asyncio.run`, which takes Ctrl-C for its own
    try:
        loop.run_until_complete(within())
    finally:
        loop.close()


def alone(call: Callable[..., None], *args: object) -> None:
    call(*args)


def press_soon() -> threading.Timer:
    return threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))


def press_ctrl_c(where: Callable[..., None]) -> None:
    """While nobody asks, three times; in between somebody does.

    Python swallows a Ctrl-C that comes in a finalizer or a callback of a weak reference: a user would press again.
    """

    def press_again(swallowed: sys.UnraisableHookArgs) -> None:
        assert isinstance(swallowed.exc_value, KeyboardInterrupt), swallowed
        press_soon().start()  # not here: Python swallows what a hook raises, too

    sys.unraisablehook = press_again
    with sampler() as (runner, url), ThreadPoolExecutor(1) as pool:
        for name in ("a", "b", "c"):
            pressed = press_soon()
            with pytest.raises(KeyboardInterrupt):
                where(sample_until_pressed, runner, pressed)
            pressed.join()
            where(sample_until, runner, pool.submit(drive, url, name))
