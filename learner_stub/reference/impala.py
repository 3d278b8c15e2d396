"""IMPALA's actor-critic: one pass over whatever has come, corrected by V-trace for the weights that sampled it.

Espeholt et al., IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures (2018),
section 4. An update takes `steps_per_update` steps or more, which may be one batch, and trains on each step `epochs`
times. What differs from PPO:

- V-trace corrects targets and advantages for every version between the weights that acted and the module as it is. So
  nothing waits for fresh samples, and no ratio is clipped while training.
- Targets are computed again before each pass, by the module as it then is.
- Advantages are divided by the deviation of the targets where that is above 1, and the value loss by its square. So the
  learning rate means the same whatever the rewards are. Divided by a deviation of their own, they would stay large
  where nothing is left to learn, and nothing clips what they do.

Random and logged actions, cut chunks and recurrent modules are treated as in PPO. Nothing here keeps random state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.learner_stub.reference.adam import Adam
from headrace.learner_stub.reference.training_arrays import load_training_state, training_state
from headrace.learner_stub.reference.training_stats import Metrics, TrainingStats
from headrace.learner_stub.rollouts.interruption import NO_INTERRUPTION, Interruption
from headrace.learner_stub.rollouts.minibatches import (
    Minibatch,
    Minibatches,
    forward_all,
    minibatches_for,
    seed_torch,
    take,
)
from headrace.learner_stub.rollouts.module import TrainableModule
from headrace.learner_stub.rollouts.returns import vtrace
from headrace.learner_stub.rollouts.rollout import Rollout, join
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.settings.config import LearnerSection


@dataclass(frozen=True, slots=True)
class PassTargets:
    """The targets of one pass; float32 (N,) each.

    - advantages: weights of the policy gradient, with the bounded importance ratio, in deviations of the targets.
    - targets: what values should have been.
    - value_scale: the value loss is multiplied by it.
    """

    advantages: Tensor
    targets: Tensor
    value_scale: float


class Impala:
    """A module, its optimizer and the stats of its batches. No I/O, no clock, no random state."""

    def __init__(self, module: TrainableModule, settings: LearnerSection) -> None:
        self.module = module
        self.settings = settings
        self.optimizer = Adam(module.parameters(), lr=settings.learning_rate, eps=1e-5)
        self.stats = TrainingStats()

    def weights(self) -> dict[str, Tensor]:
        """Return the module's state dict; its tensors are the live ones."""
        return self.module.state_dict()

    def update(self, batches: Sequence[ChunkBatch], interruption: Interruption = NO_INTERRUPTION) -> Metrics:
        """Train on every step of `batches` that the policy chose. Return metrics. Deterministic.

        `interruption` is asked between minibatches, and may end the update early. Raises `ModuleError` when module or
        batches lack what V-trace needs, and `AbandonedUpdateError`.
        """
        s = self.settings
        self.stats.count(batches)
        seed_torch(s.seed, self.stats.updates)
        metrics: Metrics = self.stats.metrics()
        rollout = join(batches)
        if rollout is not None:
            metrics |= {"learning_rate": self.optimizer.lr, **self._optimize(rollout, interruption)}
        return metrics

    def _optimize(self, rollout: Rollout, interruption: Interruption) -> Metrics:
        """Pass over the steps in shuffled minibatches; return the metrics of the last pass."""
        s = self.settings
        random = np.random.default_rng((s.seed, self.stats.updates))
        feed = minibatches_for(self.module, rollout)
        told: Metrics = {}
        for _ in range(s.epochs):
            goal, told = self._goal(rollout, feed, interruption)
            losses, ended = [], False
            for minibatch in feed.shuffled(random, s.minibatch_size):
                losses.append(self._step(rollout, goal, minibatch))
                if ended := interruption.ends_update():
                    break
            policy_loss, value_loss, entropy = torch.stack(losses).mean(0).tolist()
            told |= {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
            told["loss"] = policy_loss + s.value_coefficient * value_loss - s.entropy_coefficient * entropy
            if ended:
                break
        return told

    def _goal(self, rollout: Rollout, feed: Minibatches, interruption: Interruption) -> tuple[PassTargets, Metrics]:
        """Return what the next pass trains towards, by the module as it is."""
        dist_inputs, values = forward_all(self.module, feed, interruption)
        logp = self.module.logp(dist_inputs[torch.from_numpy(rollout.step_rows)], rollout.actions).detach()
        returns = vtrace(rollout.episodes, values, logp, gamma=self.settings.gamma)
        unit = max(float(returns.targets.std()), 1.0)
        error = returns.targets - values[rollout.step_rows]
        goal = PassTargets(
            advantages=_float32(returns.advantages / unit),
            targets=_float32(returns.targets),
            value_scale=1.0 / unit**2,
        )
        moved = logp - rollout.logp
        return goal, {
            "behaviour_kl": -moved.mean().item(),
            "clip_fraction": (moved > 0).float().mean().item(),
            "explained_variance": 1.0 - float(error.var()) / max(float(returns.targets.var()), 1e-12),
        }

    def _step(self, rollout: Rollout, goal: PassTargets, minibatch: Minibatch) -> Tensor:
        """Train on one minibatch; return policy loss, value loss and entropy, (3,), without gradients."""
        s, steps = self.settings, minibatch.steps
        answer = self.module.forward_train(minibatch.batch)
        dist_inputs, values = (answer[name][minibatch.answers] for name in ("action_dist_inputs", "values"))
        logp = self.module.logp(dist_inputs, take(rollout.actions, steps))
        policy_loss = -(goal.advantages[steps] * logp).mean()
        value_loss = (values - goal.targets[steps]).square().mean() * goal.value_scale
        entropy = self.module.entropy(dist_inputs).mean()
        self.optimizer.zero_grad()
        loss = policy_loss + s.value_coefficient * value_loss - s.entropy_coefficient * entropy
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(list(self.module.parameters()), s.max_grad_norm)
        self.optimizer.step()
        return torch.stack((policy_loss, value_loss, entropy)).detach()

    def get_state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return (plain JSON values, arrays by name) for a checkpoint. The arrays are live: write them at once."""
        return training_state(self.module, self.optimizer, self.stats)

    def set_state(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the result of `get_state`; settings stay those of the config.

        Raises `KeyError` or `RuntimeError` when the state is that of another module.
        """
        load_training_state(state, arrays, self.module, self.optimizer, self.stats)


def _float32(array: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))
