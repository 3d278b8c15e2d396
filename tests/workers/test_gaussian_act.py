"""A small policy of one Box action acts in two parts; its chunks equal those of the plain twin to the bit."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import workers
from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.connectors import FrameStack, MeanStd
from headrace.workers.envs.bounds import ActionBounds
from headrace.workers.envs.spaces import convert
from headrace.workers.modules import actor_critic
from headrace.workers.modules.split_acts import GaussianAct
from support.envs.toy import runner
from support.envs.walks import numbers_of
from support.runners.plain_twin import Edit, sampled, swap_in_the_midst

INF = np.inf
BOXES = {
    "unit": gym.spaces.Box(-1.0, 1.0, (6,), np.float32),
    "wide": gym.spaces.Box(-2.0, 2.0, (1,), np.float32),
    "uneven": gym.spaces.Box(np.array([-1, 0, -INF, -3], np.float32), np.array([1, 7, INF, INF], np.float32)),
    "half bounded": gym.spaces.Box(0.0, INF, (3,), np.float32),
    "a tenth": gym.spaces.Box(-0.1, 0.1, (2, 2), np.float64),
    "unit, float64": gym.spaces.Box(-1.0, 1.0, (9,), np.float64),
    "one number": gym.spaces.Box(-1.0, 1.0, (), np.float32),
    "no choice": gym.spaces.Box(0.0, 0.0, (2,), np.float32),
    "integers": gym.spaces.Box(-4, 9, (3,), np.int32),
}
HEADRACE = str(Path(workers.__file__).parents[1])
"""The folder of the package. A clone's own folder is often called headrace too."""
MOST_CALLS = 60
"""Python functions that a poll of one env calls, without those of the env."""


def _spaces(action: gym.Space[Any], dtype: type = np.float32) -> Spaces:
    observation = gym.spaces.Box(-INF, INF, (3,), dtype)
    return Spaces(observation=convert(observation, ""), action=convert(action, ""))


@settings(max_examples=80, deadline=None)
@given(data=st.data(), box=st.sampled_from(list(BOXES)))
def test_both_parts_together_equal_the_plain_twin_to_the_bit(data: st.DataObject, box: str) -> None:
    draw = data.draw
    config = {
        "hidden": draw(st.sampled_from([(), (5,), (64, 64)])),
        "activation": draw(st.sampled_from(["tanh", "relu"])),
        "log_std": draw(st.sampled_from([0.0, -1.5, 20.0, -20.0])),
    }
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    module = actor_critic(_spaces(BOXES[box], dtype), **config)
    act: Any = module.numpy_act()
    assert isinstance(act, GaussianAct)
    recorded, expected = [], []
    rows = draw(st.sampled_from([1, 2, 3, 8, 65]))
    for _ in range(3):
        seen = {"obs": (random.normal(size=(rows, 3)) * draw(st.sampled_from([0.0, 1.0, 50.0]))).astype(dtype)}
        noise = random.standard_normal((rows, module.noise_size), np.float32)
        noise[:: draw(st.integers(1, 4))] *= draw(st.sampled_from([0.0, -0.0, 1.0, 9.0]))
        numbers = noise if draw(st.booleans()) else None
        expected.append(act(seen, numbers))
        recorded.append({name: column.copy() for name, column in act.choose(seen, numbers).items()})
        noise[...] = np.nan
        with torch.no_grad():  # of the next step: what is recorded must not depend on the weights any more
            for parameter in module.parameters():
                parameter.mul_(-1.5)
    joined = {name: np.concatenate([step[name] for step in recorded]) for name in recorded[0]}
    made = {name: joined[name] for name in ("actions", "actions_for_env")} | act.complete(joined)
    assert list(made) == list(expected[0])
    for name in expected[0]:
        column = np.concatenate([step[name] for step in expected])
        assert (made[name].dtype, made[name].shape) == (column.dtype, column.shape)
        assert made[name].tobytes() == column.tobytes(), name


@pytest.mark.parametrize("box", BOXES)
def test_the_short_way_into_the_bounds_gives_the_bits_of_the_long_one(box: str) -> None:
    bounds = ActionBounds(convert(BOXES[box], ""))  # type: ignore[arg-type]
    odd = [0.5, -1.5] if bounds.whole else [1e-45, 0.1, 3e38, INF, -INF, np.nan]
    numbers = np.concatenate((np.random.default_rng(0).normal(size=200) * 3, [0.0, -0.0, 1.0, -1.0], odd))
    shape = BOXES[box].shape
    actions = np.broadcast_to(numbers.reshape(-1, *(1 for _ in shape)), (len(numbers), *shape))
    actions = actions.astype(np.float32 if bounds.whole else bounds.dtype)
    with np.errstate(all="ignore"):
        long, short = bounds.clip(bounds.unsquash(actions)), bounds.to_env(actions)
    assert (short.dtype, short.shape) == (long.dtype, long.shape)
    assert short.tobytes() == long.tobytes()


def test_an_action_that_an_env_keeps_is_not_overwritten() -> None:
    act: Any = actor_critic(_spaces(BOXES["unit"])).numpy_act()
    noise = np.random.default_rng(0).standard_normal((2, 6), np.float32)
    kept = act.choose({"obs": np.ones((2, 3), np.float32)}, noise)
    before = {name: kept[name].tobytes() for name in ("actions", "actions_for_env")}
    act.choose({"obs": np.zeros((2, 3), np.float32)}, -noise)
    assert before == {name: kept[name].tobytes() for name in before}


class Push(gym.Env[Any, Any]):
    """A walk of its seed and its actions, of the Box that its config names. It has infos."""

    observation_space = gym.spaces.Box(-INF, INF, (3,), np.float64)

    def __init__(self, context: Any) -> None:
        self.action_space = BOXES[context.get("box", "unit")]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at = self.np_random.normal(size=3)
        return self._at.copy(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(np.asarray(action)), action
        self._at = self._at * 0.9 + self.np_random.normal(size=3) + sum(numbers_of(action))
        return self._at.copy(), float(self._at.sum()), bool(self.np_random.random() < 0.05), False, {"x": self._at[0]}


CONFIGS: dict[str, dict[str, Any]] = {
    "usual": {},
    **{box: {"env_config": {"box": box}} for box in BOXES if box != "unit"},
    "relu": {"module_config": {"activation": "relu", "hidden": (7,)}},
    "separate layers": {"module_config": {"vf_share_layers": False}},
    "the mode": {"explore": False},
    "whole episodes": {"batch_mode": "complete_episodes"},
    "lookback": {"episode_lookback_horizon": 3},
    "connectors": {"env_to_module": [lambda: MeanStd(), lambda: FrameStack(2)]},
}


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("edit", [None, swap_in_the_midst], ids=["same weights", "other weights"])
def test_chunks_equal_those_of_the_plain_twin_to_the_bit(width: int, case: str, edit: Edit | None) -> None:
    config = {"num_envs": width, "env": Push, **CONFIGS[case]}
    assert sampled(edit, plain=False, **config) == sampled(edit, plain=True, **config)


def test_other_columns_are_made_once_a_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"__call__": 0, "choose": 0, "complete": 0}

    def counted(name: str, call: Any) -> Any:
        def run(*args: Any) -> Any:
            calls[name] += 1
            return call(*args)

        return run

    for name in calls:
        monkeypatch.setattr(GaussianAct, name, counted(name, getattr(GaussianAct, name)))
    with runner(Push, num_envs=3, rollout_fragment_length=40) as sampler:
        calls["complete"] = 0
        for fragment in range(1, 4):
            assert sampler.sample_fragment().steps == 3 * 40
            assert calls == {"__call__": 0, "choose": 40 * fragment, "complete": fragment}


def test_a_choice_allocates_no_array_of_a_layers_size() -> None:
    act: Any = actor_critic(_spaces(BOXES["wide"])).numpy_act()
    seen, noise = {"obs": np.ones((1024, 3), np.float32)}, np.full((1024, 1), 0.5, np.float32)
    act.choose(seen, noise)
    tracemalloc.start()
    try:
        act.choose(seen, noise)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1024 * 64 * 4 / 4


def test_a_poll_calls_few_functions() -> None:
    """Counts calls, because a time would depend on the machine."""
    counts: list[int] = []
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(HEADRACE)

    def mark() -> None:
        nonlocal count
        counts.append(count)
        count = 0

    with runner(Push, num_envs=1, rollout_fragment_length=100) as sampler:
        sampler.sample_fragment()
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            sampler.sample_fragment(on_poll=mark)
        finally:
            sys.setprofile(before)
    assert sorted(counts)[len(counts) // 2] <= MOST_CALLS
