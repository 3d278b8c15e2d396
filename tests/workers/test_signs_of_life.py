"""Signs of life between two calls of slow envs, and during the first reset."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.accounts.user_calls import UserCall
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, SingleAgentEnvRunner
from headrace.workers.metrics import call_mark

NUM_ENVS = 4
LENGTH = 3


class Clock:
    """A clock that only slow calls of envs move on."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(call_mark, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


class Slow(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, clock: Clock) -> None:
        self._clock, self._t = clock, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._clock.now += 1.0
        self._t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._clock.now += 1.0
        self._t += 1
        return np.zeros(1, np.float32), 1.0, self._t >= LENGTH, False, {}


class SlowAgents:
    """Two agents in an env in the dict protocol."""

    possible_agents = ("a", "b")
    observation_spaces = dict.fromkeys(possible_agents, Slow.observation_space)
    action_spaces = dict.fromkeys(possible_agents, Slow.action_space)

    def __init__(self, clock: Clock) -> None:
        self._env = Slow(clock)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, _ = self._env.reset()
        return dict.fromkeys(self.possible_agents, observation), {}

    def step(self, actions: Any) -> Any:
        observation, reward, over, _, _ = self._env.step(None)
        told = dict.fromkeys(self.possible_agents, observation)
        ends = dict.fromkeys((*self.possible_agents, "__all__"), over)
        return told, dict.fromkeys(self.possible_agents, reward), ends, dict.fromkeys(ends, False), {}


def runner_of(clock: Clock, *, several: bool) -> Any:
    common: dict[str, Any] = {"num_envs": NUM_ENVS, "seed": 0, "rollout_fragment_length": 2 * LENGTH}
    if several:
        config = EnvRunnerConfig(env=lambda _: SlowAgents(clock), policies={"p": {}}, **common)
        return MultiAgentEnvRunner(config)
    return SingleAgentEnvRunner(EnvRunnerConfig(env=lambda _: Slow(clock), **common))


@pytest.mark.parametrize("several", [False, True], ids=["one agent", "several agents"])
def test_a_sign_of_life_comes_between_any_two_slow_envs(clock: Clock, several: bool) -> None:
    signs: list[float] = [clock.now]
    with runner_of(clock, several=several) as runner:
        runner.sample_fragment(random_actions=True, on_wait=lambda: signs.append(clock.now))
    assert max(np.diff([*signs, clock.now])) <= 1.0


@pytest.mark.parametrize("several", [False, True], ids=["one agent", "several agents"])
def test_a_stop_between_two_envs_keeps_the_steps_of_the_poll(clock: Clock, several: bool) -> None:
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == NUM_ENVS + 2:  # the resets come first
            raise InterruptedError

    with runner_of(clock, several=several) as runner:
        with pytest.raises(InterruptedError):
            runner.sample_fragment(random_actions=True, on_wait=stop)
        assert runner.cut_fragment().steps == NUM_ENVS * (2 if several else 1)
        assert runner.totals.discarded == {}


def test_a_stop_during_the_first_reset_resets_all_envs_the_next_time(clock: Clock) -> None:
    def stop() -> None:
        raise InterruptedError

    with runner_of(clock, several=False) as runner:
        with pytest.raises(InterruptedError):
            runner.sample_fragment(random_actions=True, on_wait=stop)
        assert runner.cut_fragment().steps == 0
        assert runner.sample_fragment(random_actions=True).steps == NUM_ENVS * 2 * LENGTH


def test_the_env_whose_call_is_in_progress_is_marked(clock: Clock) -> None:
    marked: list[tuple[int, int]] = []

    class Marking(Slow):
        def __init__(self, context: Any) -> None:
            super().__init__(clock)
            self._note()

        def _note(self) -> None:
            if runners:
                marked.append(tuple(runners[0].totals.calls.words))  # type: ignore[arg-type]

        def reset(self, **_: Any) -> Any:
            self._note()
            return super().reset()

        def step(self, action: Any) -> Any:
            self._note()
            return super().step(action)

    runners: list[Any] = []
    config = EnvRunnerConfig(env=Marking, num_envs=2, rollout_fragment_length=1)
    with SingleAgentEnvRunner(config) as runner:
        runners.append(runner)
        runner.sample_fragment(random_actions=True)
        assert marked == [(kind, lane) for kind in (UserCall.RESET, UserCall.STEP) for lane in (0, 1)]
        assert runner.totals.calls.words[0] == UserCall.OTHER


@pytest.mark.processes
def test_the_construction_of_envs_in_processes_is_marked() -> None:
    marked: list[int] = []

    class Words(list[int]):
        def __setitem__(self, at: Any, value: Any) -> None:
            marked.append(value)

    config = EnvRunnerConfig(env="CartPole-v1", env_placement="process")
    with SingleAgentEnvRunner(config, calls=call_mark.CallMark(Words((0, 0)))):
        assert UserCall.PROCESSES in marked
