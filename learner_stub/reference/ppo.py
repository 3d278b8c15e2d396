"""Proximal policy optimization of one module, small enough to read before writing your own.

Schulman et al., Proximal Policy Optimization Algorithms (2017). An asynchronous stream calls for these choices:

- Importance ratios use the log-probs that the sampler stored, since the policy that acted is some versions older than
  the one in training. So the ratio is right however stale a step is, and the clip bounds what staleness can do.
- Actions that an external env logged are not samples of the policy. They are left out, and the steps before and after
  them are trained on as chunks of their own.
- Values are computed by the module as it is now, not read from the `values` column. An old value function's error would
  go into advantages and returns, and one forward pass is a small part of an update.
- A recurrent module is trained on whole chunks, each from the state that was stored with it.
- Where a chunk is cut, advantages go on through the next chunk of its episode, if the update has it. Else the chunk is
  bootstrapped from its last observation, unless the episode terminated there: it would have gone on.
- The value loss is divided by the variance of the returns where that is above 1. Policy and value share layers, and
  returns in the hundreds would otherwise leave the policy little of the clipped gradient.

Nothing here keeps random state: the order of minibatches follows from (seed, update), and so does what a module draws
from torch's own generator, as for dropout. So a learner that resumes from its checkpoint and gets the same batches
takes the same steps, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.adam import adam

from headrace.learner_stub.checkpoints.checkpoint import MODULE
from headrace.learner_stub.reference.training_stats import Metrics, TrainingStats
from headrace.learner_stub.rollouts.interruption import NO_INTERRUPTION, StopDeadline
from headrace.learner_stub.rollouts.minibatches import (
    Minibatch,
    Minibatches,
    forward_all,
    minibatches_for,
    seed_torch,
    take,
)
from headrace.learner_stub.rollouts.module import TrainableModule
from headrace.learner_stub.rollouts.returns import gae
from headrace.learner_stub.rollouts.rollout import Rollout, join
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import ModuleError
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


class PPO:
    """A module, its optimizer and the stats of its batches. No I/O, no clock, no random state."""

    def __init__(self, module: TrainableModule, settings: LearnerSection) -> None:
        self.module = module
        self.settings = settings
        self.optimizer = Adam(module.parameters(), lr=settings.learning_rate, eps=1e-5)
        self.stats = TrainingStats()

    def weights(self) -> dict[str, Tensor]:
        """Return the module's state dict; its tensors are the live ones."""
        return self.module.state_dict()

    def update(self, batches: Sequence[ChunkBatch], interruption: StopDeadline = NO_INTERRUPTION) -> Metrics:
        """Train on every step of `batches` that the policy chose. Return metrics. Deterministic.

        `interruption` is asked between minibatches, and may end the update early. Raises `ModuleError` when module or
        batches lack what PPO needs, and `AbandonedUpdateError`.
        """
        self.stats.count(batches)
        seed_torch(self.settings.seed, self.stats.updates)
        metrics: Metrics = self.stats.metrics()
        rollout = join(batches)
        if rollout is not None:
            feed = minibatches_for(self.module, rollout)
            targets = self._targets(rollout, feed, interruption)
            metrics["learning_rate"] = self.settings.learning_rate
            metrics["explained_variance"] = targets.explained_variance
            metrics["behaviour_kl"] = float((rollout.logp - targets.logp).mean())
            metrics |= self._optimize(rollout, targets, feed, interruption)
        return metrics

    def _targets(self, rollout: Rollout, feed: Minibatches, interruption: StopDeadline = NO_INTERRUPTION) -> Targets:
        dist_inputs, all_values = forward_all(self.module, feed, interruption)
        s = self.settings
        estimate = gae(rollout.episodes, all_values, gamma=s.gamma, gae_lambda=s.gae_lambda)
        advantage, returns = estimate.advantages, estimate.targets
        variance = float(returns.var())
        logp = self.module.logp(dist_inputs[torch.from_numpy(rollout.episodes.step_rows)], rollout.actions)
        if logp.shape != rollout.logp.shape:
            raise ModuleError(
                f"logp returned {tuple(logp.shape)} for {len(rollout)} steps; it must be one number a step"
            )
        return Targets(
            advantages=_float32((advantage - advantage.mean()) / (advantage.std() + 1e-8)),
            returns=_float32(returns),
            logp=logp.detach(),
            value_scale=1.0 / max(variance, 1.0),
            explained_variance=1.0 - float(advantage.var()) / max(variance, 1e-12),
        )

    def _optimize(self, rollout: Rollout, targets: Targets, feed: Minibatches, interruption: StopDeadline) -> Metrics:
        """Pass over the steps in shuffled minibatches, until the policy has moved by more than `target_kl`."""
        s = self.settings
        random = np.random.default_rng((s.seed, self.stats.updates))
        epoch, ended = 0, False
        seen: list[LossTerms] = []
        while epoch < s.epochs and not ended:
            epoch, seen = epoch + 1, []
            for minibatch in feed.shuffled(random, s.minibatch_size):
                seen.append(self._step(minibatch, rollout, targets))
                if ended := interruption.ends_update():
                    break
            ended = ended or _divergence(seen) > s.target_kl
        return self._measure(seen) | {"epochs": epoch}

    def _step(self, minibatch: Minibatch, rollout: Rollout, targets: Targets) -> LossTerms:
        """Take one gradient step, and return the parts of its loss."""
        s, terms = self.settings, self._terms(minibatch, rollout, targets)
        loss = s.value_coefficient * terms.value_loss + terms.policy_loss
        if s.entropy_coefficient:
            loss = loss - s.entropy_coefficient * terms.entropy
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.module.parameters(), s.max_grad_norm)
        self.optimizer.step()
        return terms

    def _terms(self, minibatch: Minibatch, rollout: Rollout, targets: Targets) -> LossTerms:
        """Return the parts of the loss: the clipped objective of equation 9, negated, and the squared error of values.

        The entropy has a gradient only where the loss counts it.
        """
        s, steps = self.settings, minibatch.steps
        answer = self.module.forward_train(minibatch.batch)
        dist_inputs, values = (answer[name][minibatch.answers] for name in ("action_dist_inputs", "values"))
        logp = self.module.logp(dist_inputs, take(rollout.actions, steps))
        ratio = torch.exp(logp - rollout.logp[steps])
        advantage = targets.advantages[steps]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - s.clip, 1 + s.clip) * advantage).mean()
        value_loss = (values - targets.returns[steps]).square().mean() * targets.value_scale
        entropy = self.module.entropy(dist_inputs if s.entropy_coefficient else dist_inputs.detach()).mean()
        return LossTerms(-gain, value_loss, entropy, ratio.detach(), logp.detach() - targets.logp[steps])

    @torch.no_grad()
    def _measure(self, seen: Sequence[LossTerms]) -> Metrics:
        """Return the metrics of one epoch: means of the losses over minibatches, and of the rest over steps."""
        s = self.settings
        losses = torch.stack([torch.stack((t.policy_loss, t.value_loss, t.entropy)) for t in seen]).mean(0)
        policy_loss, value_loss, entropy = losses.tolist()
        ratio = torch.cat([t.ratio for t in seen])
        return {
            "loss": policy_loss + s.value_coefficient * value_loss - s.entropy_coefficient * entropy,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": _divergence(seen),
            "clip_fraction": ((ratio - 1).abs() > self.settings.clip).float().mean().item(),
        }

    def get_state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return (plain JSON values, arrays by name) for a checkpoint. The arrays are live: write them at once."""
        return self.stats.get_state(), training_arrays(self.module.state_dict(), self.optimizer.state_dict())

    def set_state(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the result of `get_state`; settings stay those of the config.

        Raises `KeyError` or `RuntimeError` when the state is that of another module.
        """
        tensors, moments = training_tensors(arrays)
        self.module.load_state_dict(tensors)
        self.optimizer.load_state_dict({"state": moments})
        self.stats.set_state(state)


def _divergence(seen: Sequence[LossTerms]) -> float:
    """Return an estimate of the mean divergence since the update began: never negative, and of low variance."""
    moved = torch.cat([terms.moved for terms in seen])
    return (moved.exp() - 1 - moved).mean().item()


def _float32(array: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))


class Adam:
    """The steps of `torch.optim.Adam`, by torch's function, with the learning rate `lr`.

    Kingma and Ba, Adam: A Method for Stochastic Optimization (2015), algorithm 1, with the rates of decay given there.
    Creating one of torch's own optimizers imports torch's compiler: a second of a learner's start, and 74 MB.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, eps: float) -> None:
        self._parameters = dict(enumerate(parameters))
        self._lr, self._eps = lr, eps
        self._state: dict[int, dict[str, Tensor]] = {}
        """By the place of each parameter that has had a gradient: "step", "exp_avg" and "exp_avg_sq"."""

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move each parameter that has a gradient."""
        gradients = {place: own.grad for place, own in self._parameters.items() if own.grad is not None}
        for place in gradients.keys() - self._state.keys():
            self._state[place] = _zeros(self._parameters[place])
        states = [self._state[place] for place in gradients]
        adam(
            [self._parameters[place] for place in gradients],
            [*gradients.values()],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,  # one call for all parameters
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self._lr,
            weight_decay=0.0,
            eps=self._eps,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return {"state": {place: {"step", "exp_avg", "exp_avg_sq"}}}; the tensors are live."""
        return {"state": self._state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a copy of the result of `state_dict`. Raises `KeyError` or `RuntimeError` for other parameters."""
        self._state = {
            place: {name: zero.copy_(of[name]) for name, zero in _zeros(self._parameters[place]).items()}
            for place, of in state_dict["state"].items()
        }


def _zeros(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state before the first step. The means lie in memory as the parameter does, as `adam` needs them."""
    return {"step": torch.zeros((), device=parameter.device)} | {
        name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
    }


def training_arrays(module: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return both state dicts' tensors as arrays by name, sharing their memory.

    Hyperparameters are not kept: they are the config's.
    """
    tensors = {f"{MODULE}{name}": tensor for name, tensor in module.items()}
    for index, moments in optimizer["state"].items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in moments.items()}
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def training_tensors(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Return (module state dict, optimizer's "state") from `training_arrays`, in memory of their own."""
    module: dict[str, Tensor] = {}
    optimizer: dict[int, dict[str, Tensor]] = {}
    for name, array in arrays.items():
        part, _, rest = name.partition("/")
        tensor = torch.from_numpy(array.copy())  # a file's arrays are read-only, and torch warns of those
        if part == "module":
            module[rest] = tensor
        else:
            index, _, moment = rest.partition("/")
            optimizer.setdefault(int(index), {})[moment] = tensor
    return module, optimizer
