"""The loss by its gradients: the effect of each step on its log-prob, value and entropy, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace.learner_stub.reference.ppo import PPO
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.settings.config import LearnerSection

MakeBatch = Callable[..., ChunkBatch]

REWARDS = np.array([3.0, -3.0, 2.5, -2.0, 1.0, -1.5])
RATIOS = np.array([1.5, 1.5, 0.5, 0.5, 1.1, 0.9])
"""Now to then: above, below and inside of 1 +- 0.2, each with an advantage above and below 0."""
STEPS = len(REWARDS)
SETTINGS = LearnerSection(
    epochs=1,
    minibatch_size=STEPS,
    clip=0.2,
    value_coefficient=0.5,
    entropy_coefficient=0.01,
    max_grad_norm=1e6,
)


class Table(nn.Module):
    """Has a log-prob, a value and an entropy for each step of one batch, whose observations are the steps' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.logp_of = nn.Parameter(torch.full((STEPS,), -1.0))
        self.value_of = nn.Parameter(torch.linspace(-1.0, 1.0, STEPS))
        self.entropy_of = nn.Parameter(torch.linspace(0.5, 1.0, STEPS))

    def forward_train(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        number = batch["obs"][:, 0].long()
        dist_inputs = torch.stack([self.logp_of[number], self.entropy_of[number]], -1)
        return {"action_dist_inputs": dist_inputs, "values": self.value_of[number]}

    def logp(self, dist_inputs: Tensor, actions: Any) -> Tensor:
        return dist_inputs[:, 0]

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        return dist_inputs[:, 1]


class Recording:
    """An optimizer that moves nothing, and writes down the gradients it is given."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.gradients: dict[str, np.ndarray[Any, Any]] = {}

    def zero_grad(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None

    def step(self) -> None:
        for name, parameter in self._module.named_parameters():
            assert parameter.grad is not None
            self.gradients[name] = parameter.grad.numpy().copy()


def _one_step_each(make_batch: MakeBatch) -> ChunkBatch:
    batch = make_batch([1] * STEPS, [ChunkEnd.TERMINATED] * STEPS)  # whose returns are their rewards
    batch.arrays["obs"][:] = np.repeat(np.arange(STEPS), 2)[:, None]
    batch.columns["rewards"][:] = REWARDS
    batch.columns["logp"][:] = -1.0 - np.log(RATIOS)
    return batch


def _update(make_batch: MakeBatch, **changes: Any) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, float], Table]:
    """(gradients of the only step of one update, its metrics, the module)."""
    batch = _one_step_each(make_batch)
    module = Table()
    ppo = PPO(module, SETTINGS.model_copy(update=changes))
    recording = Recording(module)
    ppo.optimizer = recording  # type: ignore[assignment]
    return recording.gradients, ppo.update([batch]), module


def _advantages(module: Table) -> np.ndarray[Any, Any]:
    """Return the normalized advantages. Each step is an episode of its own."""
    raw = REWARDS - module.value_of.detach().numpy()
    return (raw - raw.mean()) / raw.std()


def test_the_clip_stops_only_steps_that_move_the_ratio_further_from_one(make_batch: MakeBatch) -> None:
    gradients, metrics, module = _update(make_batch)
    advantage = _advantages(module)
    assert (np.sign(advantage) == np.sign(REWARDS)).all()
    stopped = np.array([True, False, False, True, False, False])  # better and likelier already; worse and unlikelier
    expected = np.where(stopped, 0.0, -advantage * RATIOS / STEPS)
    np.testing.assert_allclose(gradients["logp_of"], expected, rtol=1e-5, atol=1e-7)
    gains = np.minimum(RATIOS * advantage, np.clip(RATIOS, 0.8, 1.2) * advantage)
    assert metrics["policy_loss"] == pytest.approx(-gains.mean(), rel=1e-5)
    assert metrics["clip_fraction"] == pytest.approx(4 / 6)


def test_the_value_loss_is_scaled_by_the_variance_of_the_returns(make_batch: MakeBatch) -> None:
    gradients, metrics, module = _update(make_batch)
    error = module.value_of.detach().numpy() - REWARDS
    assert REWARDS.var() > 1.0
    expected = SETTINGS.value_coefficient * 2 * error / STEPS / REWARDS.var()
    np.testing.assert_allclose(gradients["value_of"], expected, rtol=1e-5)
    assert metrics["value_loss"] == pytest.approx((error**2).mean() / REWARDS.var(), rel=1e-5)


def test_the_loss_favours_entropy(make_batch: MakeBatch) -> None:
    gradients, metrics, module = _update(make_batch)
    np.testing.assert_allclose(gradients["entropy_of"], -SETTINGS.entropy_coefficient / STEPS, rtol=1e-5)
    assert metrics["entropy"] == pytest.approx(module.entropy_of.mean().item(), rel=1e-5)


def test_gradients_are_clipped_by_their_global_norm(make_batch: MakeBatch) -> None:
    free, _, _ = _update(make_batch)
    norm = np.sqrt(sum((gradient**2).sum() for gradient in free.values()))
    assert norm > 0.1
    clipped, _, _ = _update(make_batch, max_grad_norm=0.1)
    for name, gradient in free.items():
        np.testing.assert_allclose(clipped[name], gradient * 0.1 / norm, rtol=1e-4)
