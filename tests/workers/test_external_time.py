"""External envs that call at unpredictable times."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ConfigError
from headrace.schemas.errors.episodes import (
    EnvError,
)
from headrace.workers import EnvRunnerConfig
from headrace.workers.sampling import external_wait
from support.envs import external, external_agents
from support.envs.external import Idle, idle, see, table
from support.runners.call_rate import IDLE, calls_a_second


def test_steps_of_a_slow_env_are_delivered_before_the_fragment_is_full() -> None:
    with idle(rollout_fragment_length=1000) as sampler:
        assert list(sampler.sample_fragment()) == []
        episodes = table(sampler)
        episodes.start("one")
        for t in range(2):
            episodes.ask("one", see(t), lambda _: None)
            chunks = sampler.sample_fragment()
        (chunk,) = chunks
        assert (len(chunk), chunk.end) == (1, ChunkEnd.ONGOING)


@pytest.mark.parametrize("kind", [external, external_agents])
def test_no_request_is_still_waiting_when_on_poll_is_called(kind: Any) -> None:
    waiting: list[int] = []
    with kind.idle(rollout_fragment_length=1000) as sampler:
        episodes = kind.table(sampler)
        episodes.start("one")
        for t in range(3):
            told: list[Any] = []
            seen = kind.see(t) if kind is external else {"a": kind.see(t)}
            episodes.ask("one", seen, told.append)
            sampler.sample_fragment(on_poll=lambda: waiting.append(episodes.counts()["waiting"]))
            assert [answer.error for answer in told] == [None]
    assert waiting
    assert not any(waiting)


def test_sample_raises_when_external_envs_stay_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"external_fragment_max_age_s.* less than 300"):
        EnvRunnerConfig(env=Idle, external_fragment_max_age_s=300)  # silence would end its worker
    monkeypatch.setattr(external_wait, "EXTERNAL_PATIENCE_S", 0.1)
    with idle() as sampler:
        table(sampler).start()
        with pytest.raises(EnvError, match=r"for 0.1 s \(1 are open\)"):
            sampler.sample(num_timesteps=1)


def test_a_sampler_that_waits_for_episodes_does_not_spin() -> None:
    with idle(external_fragment_max_age_s=1.0) as sampler:
        sampler.sample_fragment()
        assert calls_a_second(sampler.sample_fragment) < IDLE


def test_episodes_that_ask_within_the_wait_are_answered_by_one_forward_pass() -> None:
    with idle(remote_env_batch_wait_ms=10_000, num_envs=4) as sampler:
        episodes, passes = table(sampler), list[int]()
        answered: Any = sampler._sampler
        act, order = answered.envs.send_actions, [str(n) for n in range(3)]
        answered.envs.send_actions = lambda columns, lanes: (passes.append(len(lanes)), act(columns, lanes))
        for name in order:
            episodes.start(name)
        asking = threading.Thread(
            target=lambda: [episodes.ask(name, see(0), lambda _: None) for name in order], daemon=True
        )
        asking.start()
        while not passes:
            sampler.sample_fragment()
        asking.join(100)
        assert passes == [3]
