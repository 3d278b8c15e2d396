"""One update of the reference PPO beside a bare loop of torch, on the same steps: 512 in 20 minibatches of 256.

The bare loop is forward pass, loss, `backward`, clipping and torch's Adam on tensors that are ready. It computes no
advantages, metrics or targets.

PYTHONPATH=tests python -m bench.run --only learner
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench import limits
from bench.table import Row, rows_of
from bench.turns import in_turns
from headrace.learner_stub.reference.ppo import PPO
from headrace.learner_stub.rollouts.module import build_module
from headrace.learner_stub.rollouts.rollout import join
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.settings.config import LearnerSection, ModuleSection
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner

MARKS = {"headrace": 0.7}
SETTINGS = LearnerSection(steps_per_update=512, epochs=10, minibatch_size=256, target_kl=1e9)


def measure(seconds: float, rounds: int) -> list[Row]:
    """Measure shared layers and separate ones, each on batches of two fragments."""
    torch.set_num_threads(1)
    batches, spaces = sampled()
    rows = []
    for shared in (True, False):
        section = ModuleSection(config={"vf_share_layers": shared})
        arms: dict[str, Any] = {
            "bare torch": BareTorch(build_module(section, spaces), batches),
            "headrace": Update(build_module(section, spaces), batches),
        }
        turns = in_turns(arms, seconds, rounds)
        case = f"64 x 64, {'shared' if shared else 'separate'} layers"
        rows += rows_of("learner", case, "steps/s", turns, "bare torch", MARKS)
    return rows


def sampled() -> tuple[list[ChunkBatch], Spaces]:
    """Return two fragments of 256 CartPole steps, and the spaces."""
    config = EnvRunnerConfig(env=limits.ENV, num_envs=8, rollout_fragment_length=32, seed=0)
    runner = SingleAgentEnvRunner(config)
    batches = [runner.sample_fragment() for _ in range(2)]
    spaces = Spaces(observation=batches[0].observation_space, action=batches[0].action_space)
    runner.stop()
    return batches, spaces


class Update:
    """The reference learner's update."""

    pids: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, module: Any, batches: list[ChunkBatch]) -> None:
        self._ppo, self._batches = PPO(module, SETTINGS), batches

    def begin(self) -> None:
        """Do nothing."""

    def take(self) -> int:
        """Return the number of steps of one update."""
        self._ppo.update(self._batches)
        return SETTINGS.steps_per_update

    def end(self) -> None:
        """Do nothing."""


class BareTorch:
    """The gradient steps alone, in plain torch."""

    pids: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, module: Any, batches: list[ChunkBatch]) -> None:
        rollout = join(batches)
        assert rollout is not None
        self._module, self._parameters = module, list(module.parameters())
        self._optimizer = torch.optim.Adam(self._parameters, lr=SETTINGS.learning_rate, eps=1e-5)
        self._obs, self._actions = rollout.obs[torch.from_numpy(rollout.episodes.step_rows)], rollout.actions
        self._logp, self._advantages, self._returns = rollout.logp, torch.randn(512), torch.randn(512)

    def begin(self) -> None:
        """Do nothing."""

    def take(self) -> int:
        """Return the number of steps of all gradient steps."""
        for _ in range(SETTINGS.epochs):
            for rows in torch.split(torch.randperm(512), SETTINGS.minibatch_size):
                self._step(rows)
        return SETTINGS.steps_per_update

    def end(self) -> None:
        """Do nothing."""

    def _step(self, rows: torch.Tensor) -> None:
        answer = self._module.forward_train({"obs": self._obs[rows]})
        logp = self._module.logp(answer["action_dist_inputs"], self._actions[rows])
        ratio, advantage = torch.exp(logp - self._logp[rows]), self._advantages[rows]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = 0.5 * (answer["values"] - self._returns[rows]).square().mean() - gain
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, SETTINGS.max_grad_norm)
        self._optimizer.step()
