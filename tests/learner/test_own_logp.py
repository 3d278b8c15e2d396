"""`with_own_logp`: log-probs and values of recorded batches by the weights that a learner has now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from headrace.learner_stub import episodes_of, gae, to_torch, with_own_logp
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import RANDOM_ACTIONS, ChunkEnd
from headrace.schemas.errors import ModuleError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.modules import actor_critic, lstm_actor_critic

MakeBatch = Callable[..., ChunkBatch]
PIECES = ["headrace.workers.connectors:MeanStd"]


class Masked(gym.Env[Any, Any]):
    """Dict observations with a mask, and episodes of five steps."""

    observation_space = gym.spaces.Dict(
        {"at": gym.spaces.Box(-1.0, 1.0, (2,)), "action_mask": gym.spaces.MultiBinary(3)}
    )
    action_space: gym.Space[Any] = gym.spaces.Discrete(3)

    def _seen(self) -> dict[str, Any]:
        mask = np.ones(3, np.int8)
        mask[self.np_random.integers(3)] = 0
        return {"at": self.np_random.uniform(-1, 1, 2).astype(np.float32), "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._seen(), float(self.t), self.t == 5, False, {}


class Own(nn.Module):
    """A module of a user's own, with dropout and a buffer that training changes."""

    noise_size, noise_kind = 1, "uniform"

    def __init__(self, spaces: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward_train(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        out = self.net(batch["obs"])
        return {"action_dist_inputs": out[:, :2], "values": out[:, 2]}

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            answer = self.forward_train(batch)
        actions = (answer["action_dist_inputs"].softmax(-1)[:, 0] <= batch["noise"][:, 0]).long()
        return {"actions": actions, "logp": self.logp(answer["action_dist_inputs"], actions), **answer}

    forward_inference = forward_exploration

    def logp(self, dist_inputs: torch.Tensor, actions: Any) -> torch.Tensor:
        return dist_inputs.log_softmax(-1).gather(-1, actions[:, None])[:, 0]


CASES: dict[str, dict[str, Any]] = {
    "discrete": {"env": "CartPole-v1", "module": actor_critic},
    "continuous": {
        "env": "Pendulum-v1",
        "module": actor_critic,
        "module_to_env": ["headrace.workers.connectors:UnsquashActions"],
    },
    "dict, mask": {"env": lambda _: Masked(), "module": actor_critic},
    "memory": {"env": "CartPole-v1", "module": lstm_actor_critic},
    "connector": {"env": "CartPole-v1", "module": actor_critic, "env_to_module": PIECES},
    "own module": {"env": "CartPole-v1", "module": Own},
}


@pytest.mark.parametrize("case", CASES)
def test_by_the_weights_that_acted_nothing_changes(case: str) -> None:
    settings = {"num_envs": 3, "seed": 1, "rollout_fragment_length": 17, **CASES[case]}
    with SingleAgentEnvRunner(EnvRunnerConfig(**settings)) as runner:
        batches = [runner.sample_fragment() for _ in range(2)]
        module = settings["module"](runner.spaces).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for batch in batches:
        own = with_own_logp(module, batch)
        for name in ("logp", "values"):
            np.testing.assert_allclose(own.columns[name], batch.columns[name], atol=2e-5, err_msg=name)
        assert own.steps == batch.steps
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(part.training for part in module.modules())


def test_newer_weights_say_what_they_think_of_each_step(new_module: Callable[[], Any], make_batch: MakeBatch) -> None:
    module = new_module()
    batches = [make_batch([3, 2, 0], [ChunkEnd.ONGOING, ChunkEnd.TERMINATED, ChunkEnd.ABORTED], seed=s) for s in (1, 2)]
    own = episodes_of([with_own_logp(module, batch) for batch in batches])
    answer = module.forward_train({"obs": torch.from_numpy(own.obs)})
    dist_inputs = answer["action_dist_inputs"][own.step_rows]
    np.testing.assert_allclose(own.columns["logp"], module.logp(dist_inputs, torch.from_numpy(own.actions)).detach())
    values = answer["values"].detach()
    for episodes in (own, to_torch(own)):
        by_columns, by_values = gae(episodes, gamma=0.9, gae_lambda=0.8), gae(own, values, gamma=0.9, gae_lambda=0.8)
        np.testing.assert_allclose(by_columns.advantages, by_values.advantages, rtol=1e-5)
        assert type(by_columns.targets) is type(episodes.rewards)
    assert (own.columns["behaviour_logp"] == np.float32(-np.log(3))).all()
    assert (batches[0].columns["logp"] == np.float32(-np.log(3))).all()
    with pytest.raises(ModuleError, match="with_own_logp"):
        gae(batches[0].episodes(), gamma=0.9, gae_lambda=0.8)


def test_a_learner_under_autocast_gets_float32(new_module: Callable[[], Any], make_batch: MakeBatch) -> None:
    batch = make_batch([3, 2], [ChunkEnd.ONGOING, ChunkEnd.TERMINATED])
    module = new_module()
    whole = with_own_logp(module, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = with_own_logp(module, batch)
        values = module.forward_train({"obs": torch.from_numpy(batch.episodes().obs)})["values"]
        advantages = gae(to_torch(batch.episodes()), values, gamma=0.9, gae_lambda=0.8).advantages
    for name in ("logp", "values", "next_values", "action_dist_inputs"):
        assert own.columns[name].dtype == np.float32
        np.testing.assert_allclose(own.columns[name], whole.columns[name], atol=0.05, err_msg=name)
    assert advantages.dtype == torch.bfloat16
    assert advantages.isfinite().all()


def test_steps_that_no_policy_chose_are_left_out(new_module: Callable[[], Any], make_batch: MakeBatch) -> None:
    batch = make_batch([3, 2], [ChunkEnd.ONGOING, ChunkEnd.TERMINATED])
    random = make_batch([3], [ChunkEnd.ONGOING], flags=RANDOM_ACTIONS)
    random.arrays.pop("logp", None)
    for none in (random, make_batch([0], [ChunkEnd.ABORTED])):
        own = with_own_logp(new_module(), none)
        assert own.steps == len(own.columns["logp"]) == 0
        advantages = gae(to_torch(own.episodes()), gamma=0.9, gae_lambda=0.8).advantages
        assert (advantages.shape, advantages.dtype) == ((0,), torch.float32)
    logged = replace(batch, arrays={**batch.arrays, "off_policy": np.array([0, 1, 0, 0, 0], np.bool_)})
    assert [len(chunk) for chunk in with_own_logp(new_module(), logged)] == [1, 1, 2]


def test_the_lookback_has_no_numbers_of_the_weights_that_acted() -> None:
    config = EnvRunnerConfig(env="CartPole-v1", num_envs=1, seed=0, episode_lookback_horizon=3)
    with SingleAgentEnvRunner(config) as runner:
        runner.sample(num_timesteps=4)
        [chunk] = with_own_logp(runner.module, runner.sample(num_timesteps=4))
    assert chunk.lookback is not None
    assert len(chunk.lookback.actions) == 3
    assert not chunk.lookback.columns


def test_steps_of_action_chunks_are_refused(make_batch: MakeBatch) -> None:
    batch = make_batch([3], [ChunkEnd.ONGOING])
    batch = replace(batch, arrays={**batch.arrays, "action_chunk_step": np.zeros(batch.steps, np.int64)})
    with pytest.raises(ModuleError, match="a module with action_chunk_size: its actions were chosen from earlier obs"):
        with_own_logp(Own(None), batch)


def test_a_module_that_cannot_say_is_named(make_batch: MakeBatch) -> None:
    batch = make_batch([3], [ChunkEnd.ONGOING])
    with pytest.raises(ModuleError, match="Linear has no forward_train and no logp"):
        with_own_logp(nn.Linear(3, 3), batch)
    module = Own(None)
    module.logp = lambda dist_inputs, actions: dist_inputs  # type: ignore[method-assign,assignment]
    with pytest.raises(ModuleError, match="one number a step"):
        with_own_logp(module, replace(batch, arrays={**batch.arrays, "obs": np.zeros((4, 4), np.float32)}))
