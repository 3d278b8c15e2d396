"""The gradients of PPO's loss, minibatch by minibatch: by autograd for any module, or in closed form.

Both are of the same loss: the clipped objective of Schulman et al. (2017), equation 9, negated, and the mean squared
error of the values. Minibatches of the same seed hold the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from headrace.learner_stub.reference.adam import Adam
from headrace.learner_stub.rollouts.minibatches import Minibatch, Minibatches, take
from headrace.learner_stub.rollouts.module import ClosedFormGradients, TrainableModule
from headrace.learner_stub.rollouts.rollout import Rollout
from headrace.schemas.settings.config import LearnerSection


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of one update, fixed before its first step; float32 (N,) each.

    - advantages: of mean 0 and deviation 1.
    - returns: what values should have been.
    - logp: of the module before the update.
    """

    advantages: Tensor
    returns: Tensor
    logp: Tensor
    value_scale: float
    explained_variance: float


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The parts of the loss on one minibatch of n steps, and the figures that metrics are made of.

    - policy_loss, value_loss, entropy: means over the steps; scalars.
    - ratio: float32 (n,), of the policy in training to the behaviour policy.
    - moved: float32 (n,), how far the log-probs have moved since the update began.
    """

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    ratio: Tensor
    moved: Tensor


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of one update."""

    settings: LearnerSection
    rollout: Rollout
    targets: Targets


class AutogradSteps:
    """Gradients by autograd, for any module."""

    def __init__(self, module: TrainableModule, optimizer: Adam, feed: Minibatches, objective: Objective) -> None:
        self._module, self._optimizer, self._feed, self._objective = module, optimizer, feed, objective
        self._parameters = list(module.parameters())

    def epoch(self, random: np.random.Generator) -> Iterator[LossTerms]:
        """Yield the terms of each minibatch once, while its clipped gradients stand in the parameters."""
        s = self._objective.settings
        for minibatch in self._feed.shuffled(random, s.minibatch_size):
            terms = self._terms(minibatch)
            loss = s.value_coefficient * terms.value_loss + terms.policy_loss
            if s.entropy_coefficient:
                loss = loss - s.entropy_coefficient * terms.entropy
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._parameters, s.max_grad_norm)
            yield terms

    def _terms(self, minibatch: Minibatch) -> LossTerms:
        """Return the parts of the loss on one minibatch. The entropy has a gradient only where the loss counts it."""
        s, steps = self._objective.settings, minibatch.steps
        rollout, targets = self._objective.rollout, self._objective.targets
        answer = self._module.forward_train(minibatch.batch)
        dist_inputs, values = (answer[name][minibatch.answers] for name in ("action_dist_inputs", "values"))
        logp = self._module.logp(dist_inputs, take(rollout.actions, steps))
        ratio = torch.exp(logp - rollout.logp[steps])
        advantage = targets.advantages[steps]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - s.clip, 1 + s.clip) * advantage).mean()
        value_loss = (values - targets.returns[steps]).square().mean() * targets.value_scale
        entropy = self._module.entropy(dist_inputs if s.entropy_coefficient else dist_inputs.detach()).mean()
        return LossTerms(-gain, value_loss, entropy, ratio.detach(), logp.detach() - targets.logp[steps])


class ClosedFormSteps:
    """Gradients in closed form, for a module that has them. The steps are put into order once an epoch."""

    def __init__(self, form: ClosedFormGradients, objective: Objective) -> None:
        self._form, self._objective = form, objective
        rollout, targets = objective.rollout, objective.targets
        obs = rollout.obs[torch.from_numpy(rollout.step_rows)]
        steps = torch.stack((rollout.logp, targets.logp, targets.advantages, targets.returns), 1)
        self._columns = (*form.rows(obs, rollout.actions), steps)

    def epoch(self, random: np.random.Generator) -> Iterator[LossTerms]:
        """Yield the terms of each minibatch once, while its clipped gradients stand in the parameters."""
        s = self._objective.settings
        order = torch.from_numpy(random.permutation(len(self._objective.rollout)))
        parts = (torch.split(column[order], s.minibatch_size) for column in self._columns)
        for features, chosen, steps in zip(*parts, strict=True):
            terms = self._terms(features, chosen, steps)
            _clip_norm(self._form.gradient, s.max_grad_norm)
            yield terms

    def _terms(self, features: Tensor, chosen: Tensor, steps: Tensor) -> LossTerms:
        """Return the parts of the loss, and write the gradients.

        With r the ratio and A the advantage, the objective is min(r A, clip(r) A), and dr/d(logp) = r. So its
        derivative by logp is r A, and 0 where the clip holds: where r A is above clip(r) A. The derivative of a squared
        error e is 2 e.
        """
        s, value_scale, rows = self._objective.settings, self._objective.targets.value_scale, len(features)
        behaviour_logp, first_logp, advantage, returns = steps.unbind(1)
        logp, entropy, values = self._form.forward(features, chosen)
        ratio = torch.exp(logp - behaviour_logp)
        gain, bound = ratio * advantage, ratio.clamp(1 - s.clip, 1 + s.clip) * advantage
        error = values - returns
        self._form.backward(
            torch.where(gain > bound, 0.0, gain) * (-1.0 / rows),
            -s.entropy_coefficient / rows,
            error * (2.0 * s.value_coefficient * value_scale / rows),
        )
        policy_loss = -torch.minimum(gain, bound).mean()
        value_loss = error.square().mean() * value_scale
        return LossTerms(policy_loss, value_loss, entropy.mean(), ratio, logp - first_logp)


GradientSteps = AutogradSteps | ClosedFormSteps
"""Writes the gradients of one update's minibatches."""


def _clip_norm(gradient: Tensor, max_norm: float) -> None:
    """Scale `gradient` down to `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    norm = torch.linalg.vector_norm(gradient).item()
    if norm > max_norm:
        gradient.mul_(max_norm / (norm + 1e-6))
