"""The fleet's env steps, which modules get as `batch["t"]` when they explore."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from headrace.schemas.errors import StateError
from support.envs.toy import Walk, runner
from support.envs.toy_agents import Together, multi_runner


class Timed(torch.nn.Module):
    """Writes down what it was told; does the same whatever it sees."""

    noise_size = 1
    noise_kind: Literal["uniform", "normal"] = "uniform"

    def __init__(self, spaces: Any) -> None:
        super().__init__()
        self.told: list[Any] = []

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.told.append(batch["t"])
        return self._act(batch)

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.told.append(batch.get("t"))
        return self._act(batch)

    def forward_train(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _act(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": torch.zeros(len(batch["obs"]), dtype=torch.int64)}


def told(module: Any) -> list[Any]:
    """Return the recorded values of `t` and clear them."""
    taken = list(module.told)
    module.told.clear()
    return taken


def test_a_runner_without_a_fleet_multiplies_its_steps_by_num_workers() -> None:
    with runner(Walk, module=Timed, num_envs=2, num_workers=3) as sampler:
        sampler.sample(num_timesteps=8)
        assert told(sampler.module) == [0, 6, 12, 18]
        sampler.set_counters({"num_env_steps_sampled_lifetime": 1000})
        sampler.sample(num_timesteps=2)
        assert told(sampler.module) == [3000]


def test_in_a_fleet_t_is_the_steps_elsewhere_plus_the_runners_own() -> None:
    with runner(Walk, module=Timed, num_envs=2, num_workers=3) as sampler:
        sampler.set_counters({"num_env_steps_sampled_lifetime": 1000})
        sampler.steps_elsewhere = 5000
        sampler.sample(num_timesteps=4)
        assert told(sampler.module) == [5000, 5002]
        sampler.steps_elsewhere = 5100
        sampler.sample(num_timesteps=4)
        assert told(sampler.module) == [5104, 5106]
        assert all(type(t) is int for t in told(sampler.module))


def test_a_module_gets_no_t_without_exploration() -> None:
    with runner(Walk, module=Timed) as sampler:
        sampler.sample(num_timesteps=2, explore=False)
        assert told(sampler.module) == [None, None]


def test_multi_agent_modules_get_t_in_env_steps() -> None:
    with multi_runner(Together, module=Timed, num_envs=2) as sampler:
        sampler.sample(num_timesteps=6)
        assert told(sampler.modules["shared"]) == [0, 2, 4]
        sampler.steps_elsewhere = 100
        sampler.sample(num_timesteps=2)
        assert told(sampler.modules["shared"]) == [106]


@pytest.mark.parametrize(
    "counters",
    [{"num_episodes_lifetime": {"a": 1}}, {"num_agent_steps_sampled_lifetime": 3}, {"num_episodes_lifetime": "x"}],
)
def test_set_counters_refuses_bad_counters_and_changes_nothing(counters: Any) -> None:
    with runner(Walk) as sampler:
        sampler.sample(num_timesteps=5)
        before = sampler.get_counters()
        with pytest.raises(StateError, match="numbers, or numbers by name"):
            sampler.set_counters({"num_env_steps_sampled_lifetime": 1000, **counters})
        assert sampler.get_counters() == before
