"""After Ctrl-C, as in a notebook, sampling goes on: no chunk joins steps that were not one after the other."""

from __future__ import annotations

import os
import signal
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from support.envs.counting import Interrupting, interrupting_vector
from support.envs.toy import check_books, runner
from support.envs.toy_agents import Together, multi_runner
from support.envs.toy_agents import check_books as check_agent_books

NAMED = f"{Interrupting.__module__}:Interrupting"
KINDS: dict[str, dict[str, Any]] = {
    "inline": {"env": Interrupting},
    "processes": {"env": NAMED, "env_placement": "process", "envs_per_process": 2},
    "at their own pace": {
        "env": NAMED,
        "env_placement": "process",
        "envs_per_process": 1,
        "remote_env_batch_wait_ms": 0.0,
    },
    "vector": {"env": partial(interrupting_vector, SyncVectorEnv)},
    "vector of processes": {"env": partial(interrupting_vector, AsyncVectorEnv)},
}


@pytest.fixture(autouse=True)
def _ctrl_c_raises() -> Any:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _sound(chunks: Any) -> int:
    """Check that each chunk has steps one after the other, each with its own reward. Return how many."""
    for chunk in chunks:
        times = np.asarray(chunk.obs)[:, 0]
        assert (np.diff(times) == 1).all(), times
        assert np.array_equal(np.asarray(chunk.rewards), times[1:])
    return sum(len(chunk) for chunk in chunks)


@pytest.mark.parametrize("kind", KINDS)
def test_after_ctrl_c_in_a_step_the_next_samples_are_sound_and_no_env_is_blamed(kind: str, tmp_path: Path) -> None:
    told = {"length": 20, "pid": os.getpid(), "once": str(tmp_path / "interrupted")}
    with runner(**KINDS[kind], num_envs=4, env_config=told) as sampler:
        with pytest.raises(KeyboardInterrupt) as raised:
            sampler.sample(num_timesteps=4000)
        traceback.clear_frames(raised.tb)  # else Python 3.14 may warn later of the buffer of a message to an env
        assert sum(_sound(sampler.sample(num_timesteps=80)) for _ in range(4)) >= 320
        assert sampler.totals.env_failures == 0
        check_books(sampler)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("method", ["count", "record", "end"])
def test_an_error_of_a_signals_handler_loses_the_open_steps_wherever_it_comes(
    method: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    with runner(num_envs=3, env_config={"length": 7}) as sampler:
        _sound(sampler.sample(num_timesteps=30))
        _raise_once(monkeypatch, sampler, method, error)
        with pytest.raises(error):
            sampler.sample(num_timesteps=30)
        assert sum(_sound(sampler.sample(num_timesteps=30)) for _ in range(3)) >= 90


def test_agents_of_an_env_go_on_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    with multi_runner(Together, num_envs=3, env_config={"lengths": [6, 9]}) as sampler:
        sampler.sample(num_timesteps=30)
        _raise_once(monkeypatch, sampler, "record", KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            sampler.sample(num_timesteps=30)
        for _ in range(3):
            for chunk in sampler.sample(num_timesteps=30):
                assert (np.diff(np.asarray(chunk.obs)[:, 0]) == 1).all()
        check_agent_books(sampler)


def _raise_once(monkeypatch: pytest.MonkeyPatch, sampler: Any, method: str, error: type[BaseException]) -> None:
    """Let the method of the sampler's steps raise once, as a signal's handler may at the method's begin."""
    steps = sampler._sampler.steps
    real = getattr(steps, method)

    def raising(*given: Any) -> Any:
        monkeypatch.setattr(steps, method, real)
        raise error

    monkeypatch.setattr(steps, method, raising)
