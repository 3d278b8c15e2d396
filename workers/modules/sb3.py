"""Policies of Stable-Baselines3 as modules of Headrace. Workers that use it need the extra `sb3`.

In the fleet's settings:

    [module]
    build = "headrace.workers.modules.sb3:build"
    config = {algorithm = "PPO", policy = "MlpPolicy", policy_kwargs = {net_arch = [64, 64]}}

A policy that settings cannot describe has a builder of your own:

    def build(spaces):
        return as_module(make_model().policy, spaces)

The names in the state dict of such a module are those of SB3's `policy.state_dict()`. So a learner publishes just that:
for DQN and SAC the part that acts, `q_net` or `actor`, and for DQN its `exploration_rate` too.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces as gym_spaces
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.dqn.policies import DQNPolicy
from stable_baselines3.sac.policies import SACPolicy
from torch import Tensor, nn

from headrace.schemas.chunks.gymnasium_spaces import to_gym
from headrace.schemas.chunks.spaces import Spaces, leaves
from headrace.schemas.errors import ModuleError
from headrace.workers.envs.action_masks import is_mask

_KINDS = (BernoulliDistribution, CategoricalDistribution, DiagGaussianDistribution, MultiCategoricalDistribution)


def build(
    spaces: Spaces,
    *,
    algorithm: str = "PPO",
    policy: str = "MlpPolicy",
    policy_kwargs: dict[str, Any] | None = None,
) -> nn.Module:
    """Build the policy that `algorithm` of SB3 builds for these arguments, as a module.

    Raises `ModuleError` for an algorithm or a policy that SB3 does not have, and the errors of `as_module`.
    """
    aliases = getattr(getattr(stable_baselines3, algorithm, None), "policy_aliases", {})
    if policy not in aliases:
        raise ModuleError(
            f"Stable-Baselines3 {stable_baselines3.__version__} has no policy {policy!r:.80} of {algorithm!r:.80}; "
            f"it has {sorted(aliases) or 'no such algorithm'}"
        )
    _check_channels(spaces)
    made = aliases[policy](*spaces.to_gymnasium(), lambda _: 0.0, **(policy_kwargs or {}))
    return as_module(made, spaces)


def as_module(policy: BasePolicy, spaces: Spaces) -> nn.Module:
    """Return `policy` as a module that workers act with: that of PPO, A2C, DQN or SAC.

    Raises `ModuleError` where the policy is for other spaces, or of a kind that cannot act on numbers it is given.
    """
    spaces.check_gymnasium(policy.observation_space, policy.action_space, "the policy of Stable-Baselines3")
    _check_counting(spaces)
    if any(is_mask(name) for name, _ in leaves(spaces.observation, "obs")):
        raise ModuleError(
            "Stable-Baselines3's policies of PPO, A2C, DQN and SAC obey no action mask, and the observation has an "
            "'action_mask'; remove or rename it in the env, or write a module: see docs/guides/policy.md"
        )
    policy.set_training_mode(False)
    if isinstance(policy, ActorCriticPolicy) and type(policy.action_dist) in _KINDS:
        return Sb3ActorCritic(policy)
    if isinstance(policy, DQNPolicy):
        return Sb3QNetwork(policy)
    if isinstance(policy, SACPolicy) and not policy.actor.use_sde:
        return Sb3Actor(policy)
    raise ModuleError(
        f"{type(policy).__name__} of Stable-Baselines3 cannot act in workers: they take those of PPO, A2C, DQN and "
        "SAC, without gSDE (use_sde) or memory; write a module for it: see docs/guides/policy.md"
    )


def _check_counting(spaces: Spaces) -> None:
    """Raise `ModuleError` for numbers that do not start at 0."""
    for kind, space in (("actions", spaces.action), ("observations", spaces.observation)):
        for name, leaf in leaves(space, kind):
            if np.any(getattr(leaf, "start", 0)):
                raise ModuleError(f"Stable-Baselines3 counts {kind} from 0, and {name} of the env are {to_gym(leaf)}")


def _check_channels(spaces: Spaces) -> None:
    """Raise `ModuleError` for images whose channels come last. A model of SB3 turns them round in its own env."""
    for name, leaf in leaves(spaces.observation, "observations"):
        image: Any = to_gym(leaf)
        if is_image_space(image) and not is_image_space_channels_first(image):
            raise ModuleError(
                f"Stable-Baselines3's policies take images with the channels first, and {name} of the env are of shape "
                f"{image.shape}; move the channels in the env, as by gymnasium's TransformObservation"
            )


class Sb3ActorCritic(nn.Module):
    """The policy of PPO or A2C. It samples from the noise that it is given, and from nothing else.

    Answers `actions` as SB3's buffer holds them, `logp` and `values`; `actions_for_env` are the actions of a Box within
    its bounds. Layers that policy and value share are passed twice.
    """

    low: Tensor
    high: Tensor

    def __init__(self, policy: ActorCriticPolicy) -> None:
        super().__init__()
        self.policy = policy
        space = policy.action_space
        self._box = space if isinstance(space, gym_spaces.Box) else None
        if self._box is not None:
            _keep_bounds(self, self._box)
        self.noise_kind: Literal["uniform", "normal"] = "uniform" if self._box is None else "normal"
        self.noise_size = math.prod(space.shape or ())

    @torch.no_grad()
    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Sample actions by `batch["noise"]`."""
        distribution = self.policy.get_distribution(batch["obs"])
        return self._answer(batch["obs"], distribution, _sample(distribution, batch["noise"]))

    @torch.no_grad()
    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take the mode."""
        distribution = self.policy.get_distribution(batch["obs"])
        return self._answer(batch["obs"], distribution, distribution.mode())

    def _answer(self, obs: Any, distribution: Distribution, actions: Tensor) -> dict[str, Any]:
        values = self.policy.predict_values(obs)[:, 0]
        answer = {"logp": distribution.log_prob(actions), "values": values}
        return {**self._shaped(actions), **answer}

    def torch_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take the mode for an export, which cannot hold SB3's objects of distributions: they check their values."""
        policy = self.policy
        features = super(ActorCriticPolicy, policy).extract_features(batch["obs"], policy.pi_features_extractor)
        made = policy.action_net(policy.mlp_extractor.forward_actor(features))
        match policy.action_dist:
            case CategoricalDistribution():
                made = made.argmax(1)
            case MultiCategoricalDistribution(action_dims=sizes):
                made = torch.stack([logits.argmax(1) for logits in made.split(list(sizes), 1)], 1)
            case BernoulliDistribution():
                made = (made > 0).float()
        return self._shaped(made)

    def _shaped(self, actions: Tensor) -> dict[str, Tensor]:
        shaped = actions.reshape(-1, *(self.policy.action_space.shape or ()))
        if self._box is None:
            return {"actions": shaped}
        shaped = shaped.to(self.low.dtype)
        return {"actions": shaped, "actions_for_env": shaped.clamp(self.low, self.high)}

    def policy_actions(self, env_actions: dict[str, Any]) -> dict[str, Any]:
        """Return the actions, by column, for which the env gets `env_actions`: the same ones."""
        return dict(env_actions)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the tensors by the names that they have in SB3."""
        return self.policy.state_dict(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load tensors by the names that they have in SB3."""
        return self.policy.load_state_dict(*arguments, **options)


class Sb3QNetwork(nn.Module):
    """The Q-network of DQN. It explores with the `exploration_rate` that comes with its weights, 1 before the first."""

    noise_size, noise_kind = 2, "uniform"

    def __init__(self, policy: DQNPolicy) -> None:
        super().__init__()
        self.q_net = policy.q_net
        self.exploration_rate: Tensor
        self.register_buffer("exploration_rate", torch.ones(()))

    @torch.no_grad()
    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the best action, or any with the probability `exploration_rate`."""
        values, noise = self.q_net(batch["obs"]), batch["noise"]
        any_action = (noise[:, 1] * values.shape[1]).long().clamp(max=values.shape[1] - 1)
        return {"actions": torch.where(noise[:, 0] < self.exploration_rate, any_action, values.argmax(1))}

    @torch.no_grad()
    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the best action."""
        return {"actions": self.q_net(batch["obs"]).argmax(1)}


class Sb3Actor(nn.Module):
    """The actor of SAC. Its `actions` are in [-1, 1], as in SB3's buffer. The env gets them scaled to its bounds."""

    noise_kind = "normal"
    low: Tensor
    high: Tensor

    def __init__(self, policy: SACPolicy) -> None:
        super().__init__()
        self.actor = policy.actor
        space: Any = policy.action_space
        _keep_bounds(self, space)
        self.noise_size = math.prod(space.shape)

    @torch.no_grad()
    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Sample actions by `batch["noise"]`."""
        mean, log_std, _ = self.actor.get_action_dist_params(batch["obs"])
        return self._answer(mean + log_std.exp() * batch["noise"])

    @torch.no_grad()
    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the action of the mean."""
        return self._answer(self.actor.get_action_dist_params(batch["obs"])[0])

    def _answer(self, gaussian: Tensor) -> dict[str, Any]:
        low, span = self.low, self.high - self.low
        actions = torch.tanh(gaussian).reshape(-1, *low.shape).to(low.dtype)
        return {"actions": actions, "actions_for_env": low + 0.5 * (actions + 1.0) * span}

    def policy_actions(self, env_actions: dict[str, Any]) -> dict[str, Any]:
        """Return the actions in [-1, 1], by column, for which the env gets `env_actions`."""
        low, high = (bound.numpy(force=True) for bound in (self.low, self.high))
        return {name: 2.0 * (rows - low) / (high - low) - 1.0 for name, rows in env_actions.items()}


def _keep_bounds(module: nn.Module, box: gym_spaces.Box) -> None:
    """Keep the bounds where the module is, and out of its state dict."""
    for name, bound in (("low", box.low), ("high", box.high)):
        module.register_buffer(name, torch.as_tensor(bound), persistent=False)


def _sample(distribution: Distribution, noise: Tensor) -> Tensor:
    """Sample by noise (rows, size): uniform numbers for choices, standard normal ones for a Gaussian."""
    inner: Any = distribution.distribution
    match distribution:
        case DiagGaussianDistribution():
            return torch.as_tensor(inner.mean + inner.stddev * noise)
        case BernoulliDistribution():
            return torch.lt(noise, inner.probs).float()
        case MultiCategoricalDistribution():
            return torch.stack([_pick(part.probs, noise[:, k]) for k, part in enumerate(inner)], 1)
    return _pick(inner.probs, noise[:, 0])


def _pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return an index (rows,) by the inverse of the cumulative distribution."""
    below = probabilities.cumsum(-1) <= uniform[:, None]
    return below.sum(-1).clamp(max=probabilities.shape[-1] - 1)
