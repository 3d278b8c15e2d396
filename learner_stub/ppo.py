"""Proximal policy optimization of one module, small enough to read before writing your own.

Schulman et al., Proximal Policy Optimization Algorithms (2017). The choices that an asynchronous stream asks for:

- Importance ratios are taken against the log-probs the sampler stored, since the policy that acted is some versions
  older than the one in training: the ratio is right however stale a step is, and the clip bounds what staleness can do.
- Values are computed anew by the module as it is now, not read from the `values` column: an old value function's error
  would go into advantages and returns alike, and one forward pass is a small part of an update.
- A chunk is bootstrapped from its last observation unless the episode terminated there: an episode that was cut,
  truncated or aborted would have gone on.
- The value loss is divided by the variance of the returns where that is above 1. Policy and value share layers, and
  returns in the hundreds would otherwise leave the policy little of the clipped gradient.

Nothing here keeps random state: the order of minibatches follows from (seed, update), so a learner that resumes from
its checkpoint and gets the same batches takes the same steps, to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.learner_stub.checkpoint import training_arrays, training_tensors
from headrace.learner_stub.gae import advantages
from headrace.learner_stub.module import TrainableModule, check_answer
from headrace.learner_stub.rollout import Rollout, join, map_nested
from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.config import LearnerSection
from headrace.schemas.errors import ModuleError

RECENT_EPISODES = 100
_FORWARD_ROWS = 4096
"""Rows of one forward pass without gradients: bounds the memory that images take."""

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Targets:
    """What one update steers by, fixed before its first step; float32 (N,) each.

    advantages: of mean 0 and deviation 1. returns: what values should have been. logp: of the policy before the update.
    """

    advantages: Tensor
    returns: Tensor
    logp: Tensor
    value_scale: float
    explained_variance: float


class PPO:
    """A module, its optimizer and the learner's counters. No I/O, no clock, no random state."""

    def __init__(self, module: TrainableModule, settings: LearnerSection) -> None:
        self.module = module
        self.settings = settings
        self.optimizer = torch.optim.Adam(module.parameters(), lr=settings.learning_rate, eps=1e-5)
        self.updates = 0
        self.steps = 0
        self.episodes = 0
        self.recent_returns: deque[float] = deque(maxlen=RECENT_EPISODES)

    def update(self, batches: Sequence[ChunkBatch]) -> Metrics:
        """Train on every step of `batches` that the policy chose; says what came of it. Deterministic.

        Raises `ModuleError` when module or batches lack what PPO needs.
        """
        self._count(batches)
        metrics: Metrics = {"update": self.updates, "steps": self.steps, "episodes": self.episodes}
        if self.recent_returns:
            metrics["mean_return"] = float(np.mean(self.recent_returns))
        rollout = join(batches)
        if rollout is not None:
            targets = self._targets(rollout)
            metrics["explained_variance"] = targets.explained_variance
            metrics["behaviour_kl"] = float((rollout.logp - targets.logp).mean())
            metrics |= self._optimize(rollout, targets)
        return metrics

    def _count(self, batches: Sequence[ChunkBatch]) -> None:
        self.updates += 1
        for batch in batches:
            done = np.isin(batch.table["end"], (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED))
            self.steps += batch.steps
            self.episodes += int(done.sum())
            self.recent_returns.extend(batch.table["episode_return"][done].tolist())

    def _targets(self, rollout: Rollout) -> Targets:
        dist_inputs, all_values = self._forward(rollout.obs)
        step_rows = rollout.step_rows
        values = all_values[step_rows]
        bootstraps = np.where(rollout.terminated, 0.0, all_values[rollout.last_rows])
        s = self.settings
        advantage = advantages(
            rollout.rewards, values, bootstraps, rollout.offsets, gamma=s.gamma, gae_lambda=s.gae_lambda
        )
        returns = advantage + values
        variance = float(returns.var())
        logp = self.module.logp(dist_inputs[torch.from_numpy(step_rows)], rollout.actions)
        if logp.shape != rollout.logp.shape:
            raise ModuleError(
                f"logp answered {tuple(logp.shape)} for {len(rollout)} steps; it must be one number a step"
            )
        return Targets(
            advantages=_float32((advantage - advantage.mean()) / (advantage.std() + 1e-8)),
            returns=_float32(returns),
            logp=logp.detach(),
            value_scale=1.0 / max(variance, 1.0),
            explained_variance=1.0 - float(advantage.var()) / max(variance, 1e-12),
        )

    def _forward(self, obs: Any) -> tuple[Tensor, NDArray[np.float64]]:
        """(action_dist_inputs (rows, ...), values (rows,)) of the module as it is, without gradients."""
        rows = len(_first(obs))
        dist_inputs, values = [], []
        with torch.no_grad():
            for start in range(0, rows, _FORWARD_ROWS):
                part = slice(start, min(start + _FORWARD_ROWS, rows))
                answer = check_answer(self.module.forward_train({"obs": _rows(obs, part)}), part.stop - part.start)
                dist_inputs.append(answer[0])
                values.append(answer[1])
        return torch.cat(dist_inputs), torch.cat(values).double().numpy()

    def _optimize(self, rollout: Rollout, targets: Targets) -> Metrics:
        """Passes over the steps in shuffled minibatches, until the policy has moved by more than `target_kl`."""
        s = self.settings
        random = np.random.default_rng((s.seed, self.updates))
        step_rows = torch.from_numpy(rollout.step_rows)
        metrics: Metrics = {}
        for epoch in range(1, s.epochs + 1):
            seen: list[Metrics] = []
            for steps in torch.split(torch.from_numpy(random.permutation(len(rollout))), s.minibatch_size):
                loss, minibatch = self._loss(rollout, targets, steps, step_rows[steps])
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.module.parameters(), s.max_grad_norm)
                self.optimizer.step()
                seen.append(minibatch)
            metrics = {name: float(np.mean([m[name] for m in seen])) for name in seen[0]} | {"epochs": epoch}
            if metrics["kl"] > s.target_kl:
                break
        return metrics

    def _loss(self, rollout: Rollout, targets: Targets, steps: Tensor, obs_rows: Tensor) -> tuple[Tensor, Metrics]:
        """The clipped objective of equation 9 on one minibatch, negated."""
        s = self.settings
        answer = self.module.forward_train({"obs": _rows(rollout.obs, obs_rows)})
        logp = self.module.logp(answer["action_dist_inputs"], _rows(rollout.actions, steps))
        ratio = torch.exp(logp - rollout.logp[steps])
        advantage = targets.advantages[steps]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - s.clip, 1 + s.clip) * advantage).mean()
        value_loss = (answer["values"] - targets.returns[steps]).square().mean() * targets.value_scale
        entropy = self.module.entropy(answer["action_dist_inputs"]).mean()
        loss = s.value_coefficient * value_loss - gain - s.entropy_coefficient * entropy
        with torch.no_grad():
            moved = logp - targets.logp[steps]
            measured = {
                "policy_loss": -gain,
                "value_loss": value_loss,
                "entropy": entropy,
                "kl": (moved.exp() - 1 - moved).mean(),  # never negative, and of low variance
                "clip_fraction": ((ratio - 1).abs() > s.clip).float().mean(),
            }
        return loss, {name: value.item() for name, value in measured.items()}

    def get_state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """(plain JSON values, arrays by name) for a checkpoint. The arrays are the live ones: write them at once."""
        state = {
            "updates": self.updates,
            "steps": self.steps,
            "episodes": self.episodes,
            "recent_returns": list(self.recent_returns),
        }
        return state, training_arrays(self.module.state_dict(), self.optimizer.state_dict())

    def set_state(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from `get_state`'s answer; settings stay those of the config.

        Raises `KeyError` or `RuntimeError` when the state is that of another module.
        """
        module, moments = training_tensors(arrays)
        self.module.load_state_dict(module)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        self.updates, self.steps, self.episodes = state["updates"], state["steps"], state["episodes"]
        self.recent_returns = deque(state["recent_returns"], maxlen=RECENT_EPISODES)


def _rows(value: Any, rows: slice | Tensor) -> Any:
    return map_nested(lambda tensor: tensor[rows], value)


def _first(value: Any) -> Tensor:
    """Any tensor of a nested observation."""
    while isinstance(value, dict | tuple):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return torch.as_tensor(value)


def _float32(array: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))
