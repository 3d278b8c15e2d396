"""A small policy of one Discrete action acts in two parts; its chunks equal those of the plain twin to the bit."""

from __future__ import annotations

import tracemalloc
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.connectors import FrameStack, MeanStd
from headrace.workers.envs.spaces import convert
from headrace.workers.modules import actor_critic
from headrace.workers.modules.split_acts import ChoiceAct
from support.envs.toy import Faulty, Walk, runner
from support.runners.plain_twin import Edit, act_plainly, sampled, swap_in_the_midst

_OF_A_USER = 5
"""The poll after which a module of another kind takes over."""


def _spaces(choices: int, start: int, dtype: type = np.float32, size: int = 3) -> Spaces:
    observation = gym.spaces.Box(-np.inf, np.inf, (size,), dtype)
    return Spaces(observation=convert(observation, ""), action=convert(gym.spaces.Discrete(choices, start=start), ""))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_both_parts_together_equal_the_plain_twin_to_the_bit(data: st.DataObject) -> None:
    draw = data.draw
    choices, start = draw(st.integers(1, 9)), draw(st.integers(-5, 5))
    config = {
        "hidden": draw(st.sampled_from([(), (5,), (64, 64)])),
        "activation": draw(st.sampled_from(["tanh", "relu"])),
    }
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    module = actor_critic(_spaces(choices, start, dtype), **config)
    module.load_state_dict(
        {name: w + draw(st.sampled_from([0.0, 0.1, 30.0])) for name, w in module.state_dict().items()}
    )
    act: Any = module.numpy_act()
    assert isinstance(act, ChoiceAct)
    recorded, expected = [], []
    rows = draw(st.sampled_from([1, 2, 3, 8, 65]))
    for _ in range(3):
        seen = {"obs": (random.normal(size=(rows, 3)) * draw(st.sampled_from([0.0, 1.0, 50.0]))).astype(dtype)}
        noise = random.random((rows, 1), np.float32)
        noise[:: draw(st.integers(1, 4))] = draw(
            st.sampled_from([0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))])
        )
        numbers = noise if draw(st.booleans()) else None
        expected.append(act(seen, numbers))
        recorded.append({name: column.copy() for name, column in act.choose(seen, numbers).items()})
        with torch.no_grad():  # of the next step: what is recorded must not depend on the weights any more
            module.head.weight.mul_(-1.5)
    joined = {name: np.concatenate([step[name] for step in recorded]) for name in recorded[0]}
    made = {"actions": joined["actions"], **act.complete(joined)}
    for name in expected[0]:
        column = np.concatenate([step[name] for step in expected])
        assert (made[name].dtype, made[name].shape) == (column.dtype, column.shape)
        assert made[name].tobytes() == column.tobytes(), name
    assert made.keys() == expected[0].keys()


@pytest.mark.parametrize("choices", [2, 3, 4])
def test_numbers_on_a_border_pick_as_the_plain_twin_does(choices: int) -> None:
    """A number that is exactly the share of the choices before, and choices that are impossible."""
    module = actor_critic(_spaces(choices, 0))
    act: Any = module.numpy_act()
    seen = {"obs": np.zeros((3, 3), np.float32)}  # all choices are equally likely
    noise = np.array([[0.0], [1 / choices], [0.5]], np.float32)
    for impossible in ([], [0], [choices - 1], list(range(choices - 1))):
        with torch.no_grad():
            module.head.bias.zero_()[impossible] = -1e9
        assert act.choose(seen, noise)["actions"].tolist() == act(seen, noise)["actions"].tolist()


def _fail(answer: Any) -> Any:
    raise RuntimeError("broken on purpose")


CONFIGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "relu": {"module_config": {"activation": "relu", "hidden": (7,)}},
    "separate layers": {"module_config": {"vf_share_layers": False}},
    "memory": {"module": "headrace.workers.modules:lstm_actor_critic"},
    "the mode": {"explore": False},
    "whole episodes": {"batch_mode": "complete_episodes"},
    "lookback": {"episode_lookback_horizon": 3},
    "connectors": {"env_to_module": [lambda: MeanStd(), lambda: FrameStack(2)]},
}


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("edit", [None, swap_in_the_midst], ids=["same weights", "other weights"])
def test_chunks_equal_those_of_the_plain_twin_to_the_bit(width: int, case: str, edit: Edit | None) -> None:
    config = {"num_envs": width, **CONFIGS[case]}
    assert sampled(edit, plain=False, **config) == sampled(edit, plain=True, **config)


@pytest.mark.processes
def test_chunks_of_envs_in_processes_equal_those_of_the_plain_twin_to_the_bit() -> None:
    placed = {"env": "support.envs.toy:Walk", "env_placement": "process", "envs_per_process": 3}
    fast = sampled(swap_in_the_midst, plain=False, num_envs=3, **placed)
    assert fast == sampled(swap_in_the_midst, plain=True, num_envs=3)


@pytest.mark.parametrize("width", [2, 9])
def test_chunks_equal_those_of_the_plain_twin_where_envs_fail(width: int) -> None:
    def config() -> dict[str, Any]:
        settings = {"faulty": {0}, "fault": _fail, "every": 11, "steps": {}}
        return {"env": Faulty, "num_envs": width, "env_config": settings, "env_restart_attempts": 100}

    assert sampled(None, plain=False, **config()) == sampled(None, plain=True, **config())


def test_a_module_that_takes_over_in_the_midst_of_a_fragment_completes_the_steps_of_the_other() -> None:
    def take_over(sampler: Any, poll: int, *, plain: bool) -> None:
        if poll in (5, 30, 45):
            (module_id,) = sampler._existing_sampler.steps.policies
            other: Any = actor_critic(sampler.spaces, seed=poll)
            if plain or poll == _OF_A_USER:
                act_plainly(other)
            sampler._existing_sampler.use({module_id: other}, lambda: 0)

    fast = sampled(partial(take_over, plain=False), plain=False, num_envs=3)
    assert fast == sampled(partial(take_over, plain=True), plain=True, num_envs=3)


def test_other_columns_are_made_once_a_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a step: so the cost of log-probs does not depend on the number of polls."""
    calls = {"__call__": 0, "choose": 0, "complete": 0}
    for name in calls:
        monkeypatch.setattr(ChoiceAct, name, _counted(getattr(ChoiceAct, name), calls, name))
    with runner(Walk, num_envs=3, rollout_fragment_length=40) as sampler:
        calls["complete"] = 0
        for fragment in range(1, 4):
            assert sampler.sample_fragment().steps == 3 * 40
            assert calls == {"__call__": 0, "choose": 40 * fragment, "complete": fragment}


def _counted(call: Any, calls: dict[str, int], name: str) -> Any:
    def run(*args: Any) -> Any:
        calls[name] += 1
        return call(*args)

    return run


def test_a_choice_allocates_no_array_of_a_layers_size() -> None:
    act: Any = actor_critic(_spaces(3, 0)).numpy_act()
    seen, noise = {"obs": np.ones((1024, 3), np.float32)}, np.full((1024, 1), 0.5, np.float32)
    act.choose(seen, noise)
    tracemalloc.start()
    try:
        act.choose(seen, noise)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1024 * 64 * 4 / 4
