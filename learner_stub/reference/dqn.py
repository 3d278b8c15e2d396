"""Double DQN from the stream: steps go into a replay buffer, and gradient steps follow at a fixed rate.

Mnih et al., Human-level control through deep reinforcement learning (2015); van Hasselt et al., Deep Reinforcement
Learning with Double Q-learning (2016), equation 4. An asynchronous stream calls for these choices:

- Every step is trained on, random and logged ones too: targets do not depend on who chose the action.
- The rate of exploration travels with the weights, as the module's buffer `exploration_rate`, and falls by the steps
  that came. So all workers explore alike, however many there are.
- A cut chunk ends an n-step return early: fewer rewards count, and the value of its last observation stands for the
  rest. Only a terminated episode has no rest.

The replay buffer is not in the checkpoint. A learner that resumes has its weights, optimizer and counters, a target
network equal to its weights, and trains again once `learning_starts` new steps have come. Minibatches follow from
(seed, update).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.learner_stub.reference.adam import Adam
from headrace.learner_stub.reference.replay import ReplayBuffer
from headrace.learner_stub.reference.training_arrays import load_training_state, training_state
from headrace.learner_stub.reference.training_stats import Metrics, TrainingStats
from headrace.learner_stub.rollouts.interruption import NO_INTERRUPTION, Interruption
from headrace.learner_stub.rollouts.minibatches import seed_torch
from headrace.learner_stub.rollouts.module import QModule
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.spaces import Discrete, Spaces
from headrace.schemas.errors import ModuleError
from headrace.schemas.settings.config import LearnerSection


class DQN:
    """A module, its target network, its optimizer, the replay buffer, and the stats of its batches."""

    def __init__(self, module: QModule, settings: LearnerSection, spaces: Spaces) -> None:
        """Raise `ModuleError` for an action space other than Discrete, and for a recurrent module."""
        if not isinstance(spaces.action, Discrete):
            raise ModuleError(
                f"DQN chooses among the actions of a Discrete space, and this space is {spaces.action!r:.200}; take "
                'learner.algorithm = "ppo" or "impala"'
            )
        if hasattr(module, "initial_state"):
            raise ModuleError(
                f"{type(module).__name__} is recurrent, and DQN trains on single transitions, without a state before "
                'them; take a module without memory, or learner.algorithm = "ppo" or "impala"'
            )
        self.module = module
        self.settings = settings
        self.stats = TrainingStats()
        self.optimizer = Adam(module.parameters(), lr=settings.learning_rate, eps=1e-5)
        self.replay = ReplayBuffer(settings.buffer_size)
        self._spaces, self._first_action = spaces, spaces.action.start
        self._target = deepcopy(module)
        self._gradient_steps, self._owed = 0, 0.0
        self._explore()

    def weights(self) -> dict[str, Tensor]:
        """Return the module's state dict, with the rate of exploration; its tensors are the live ones."""
        return self.module.state_dict()

    def update(self, batches: Sequence[ChunkBatch], interruption: Interruption = NO_INTERRUPTION) -> Metrics:
        """Add every step of `batches` to the replay buffer, and make the gradient steps that are due. Return metrics.

        `interruption` is asked between gradient steps, and may end the update early. Raises `ModuleError` and
        `AbandonedUpdateError`.
        """
        s = self.settings
        self.stats.count(batches)
        seed_torch(s.seed, self.stats.updates)
        self._explore()
        for batch in batches:
            if batch.steps:
                before = len(self.replay)
                self.replay.add(batch, gamma=s.gamma, n_step=s.n_step)
                if before >= s.learning_starts:
                    self._owed += batch.steps * s.gradient_steps_per_step
        metrics = self.stats.metrics() | {"exploration_rate": float(self.module.exploration_rate)}
        return metrics | self._optimize(interruption)

    def _explore(self) -> None:
        """Set the rate of exploration for the steps trained on so far."""
        s = self.settings
        passed = min(1.0, self.stats.steps / s.exploration_steps)
        self.module.exploration_rate.fill_(1.0 + passed * (s.exploration_final - 1.0))

    def _optimize(self, interruption: Interruption) -> Metrics:
        """Make the gradient steps that are due. What an interruption leaves is due at the next update."""
        s = self.settings
        random = np.random.default_rng((s.seed, self.stats.updates))
        seen = []
        while self._owed >= 1.0:
            interruption.check()
            seen.append(self._step(self.replay.sample(random, s.minibatch_size, self._spaces)))
            self._owed -= 1.0
            if interruption.ends_update():
                break
        if not seen:
            return {}
        loss, value = torch.stack(seen).mean(0).tolist()
        return {"loss": loss, "q_value": value, "learning_rate": self.optimizer.lr}

    def _step(self, sample: Mapping[str, Any]) -> Tensor:
        """Make one gradient step; return its loss and the mean value of the actions taken, (2,)."""
        targets = self._targets(sample)
        chosen = (sample["actions"].long() - self._first_action)[:, None]
        values = self.module.q_values(sample["obs"]).gather(1, chosen)[:, 0]
        loss = nn.functional.smooth_l1_loss(values, targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(list(self.module.parameters()), self.settings.max_grad_norm)
        self.optimizer.step()
        self._gradient_steps += 1
        if self._gradient_steps % self.settings.target_update_interval == 0:
            self._target.load_state_dict(self.module.state_dict())
        return torch.stack((loss, values.mean())).detach()

    @torch.no_grad()
    def _targets(self, sample: Mapping[str, Any]) -> Tensor:
        """Return what the values of the actions taken should be: the module chooses, the target network values."""
        best = self.module.q_values(sample["next_obs"]).argmax(1, keepdim=True)
        after = self._target.q_values(sample["next_obs"]).gather(1, best)[:, 0]
        return torch.as_tensor(sample["returns"] + sample["discounts"] * after)

    def get_state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return (plain JSON values, arrays by name) for a checkpoint. The arrays are live: write them at once."""
        return training_state(self.module, self.optimizer, self.stats)

    def set_state(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the result of `get_state` with an empty replay buffer; settings stay those of the config.

        Raises `KeyError` or `RuntimeError` when the state is that of another module.
        """
        load_training_state(state, arrays, self.module, self.optimizer, self.stats)
        self._target.load_state_dict(self.module.state_dict())
