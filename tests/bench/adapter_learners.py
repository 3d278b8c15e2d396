"""PPO in plain torch, by TorchRL's losses and by RLlib's learner: what a reader's own `update` might be.

All train on one batch an update, with the settings of Headrace's recipes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.deploy.annexes.ray import rllib_policy
from headrace.workers.envs.spaces import spaces_of


class Watch:
    """Calls `kill` once, when a run has come so far."""

    def __init__(self, kill: Callable[[], Any], after: int) -> None:
        self._kill, self._after = kill, after
        self.killed = False
        self._steps = 0

    def at(self, steps: int) -> None:
        """Say how many steps the run has trained on."""
        if steps >= self._after and not self.killed:
            self.killed = True
            self._kill()

    def add(self, steps: int) -> None:
        """Say how many steps more the run has trained on."""
        self._steps += steps
        self.at(self._steps)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of PPO."""

    learning_rate: float
    gamma: float
    gae_lambda: float
    minibatch_size: int
    epochs: int = 10
    clip: float = 0.2
    max_grad_norm: float = 1.0
    most_steps: int = 2048
    """In one batch."""
    value_coefficient: float = 0.01
    """RLlib's. The others divide the value loss by the variance of the returns."""


CARTPOLE = Settings(learning_rate=0.002, gamma=0.98, gae_lambda=0.8, minibatch_size=256)
PENDULUM = Settings(learning_rate=0.0013, gamma=0.9, gae_lambda=0.95, minibatch_size=96, value_coefficient=0.0025)


class TorchPPO:
    """An `update(module, steps)` for the transitions of an `EpisodeDataset`."""

    def __init__(self, settings: Settings, watch: Watch) -> None:
        self._settings, self._watch = settings, watch
        self._optimizer: torch.optim.Optimizer | None = None

    def __call__(self, module: Any, steps: Any) -> None:
        s = self._settings
        self._watch.add(len(steps))
        if self._optimizer is None:
            self._optimizer = torch.optim.Adam(module.parameters(), lr=s.learning_rate, eps=1e-5)
        advantages, returns = _estimate(module, steps, s)
        scale = 1.0 / max(float(returns.var()), 1.0)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(s.epochs):
            for rows in torch.randperm(len(steps)).split(s.minibatch_size):
                answer = module.forward_train({"obs": steps.obs[rows]})
                logp = module.logp(answer["action_dist_inputs"], steps.actions[rows])
                ratio = (logp - steps.columns["logp"][rows]).exp()
                held = ratio.clamp(1 - s.clip, 1 + s.clip)
                policy_loss = -torch.minimum(ratio * advantages[rows], held * advantages[rows]).mean()
                value_loss = (answer["values"] - returns[rows]).square().mean() * scale
                self._optimizer.zero_grad()
                (policy_loss + value_loss).backward()
                nn.utils.clip_grad_norm_(module.parameters(), s.max_grad_norm)
                self._optimizer.step()


@torch.no_grad()
def _estimate(module: Any, steps: Any, s: Settings) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, (N,) each. A chunk that is cut is bootstrapped from its last observation."""
    values, after = (module.forward_train({"obs": obs})["values"] for obs in (steps.obs, steps.next_obs))
    deltas = steps.rewards.float() + s.gamma * after * ~steps.terminated - values
    goes_on = (~steps.last * s.gamma * s.gae_lambda).tolist()
    advantages, following = deltas.tolist(), 0.0
    for row in reversed(range(len(advantages))):
        following = advantages[row] = advantages[row] + goes_on[row] * following
    estimate = torch.tensor(advantages)
    return estimate, estimate + values


class TorchRLPPO:
    """An `update(module, steps)` for the TensorDicts of `to_tensordict`, by `GAE` and `ClipPPOLoss`."""

    def __init__(self, settings: Settings, watch: Watch) -> None:
        self._settings, self._watch = settings, watch
        self._parts: tuple[Any, Any, Any, Any] | None = None

    def __call__(self, module: Any, steps: Any) -> None:
        s = self._settings
        self._watch.add(len(steps))
        if self._parts is None:
            self._parts = self._build(module)
        loss, estimator, optimizer, buffer = self._parts
        with torch.no_grad():
            estimator(steps)
        scale = 1.0 / max(float(steps["value_target"].var()), 1.0)
        buffer.empty()
        buffer.extend(steps)
        for _ in range(s.epochs):
            for part in buffer:
                losses = loss(part)
                optimizer.zero_grad()
                (losses["loss_objective"] + scale * losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(module.parameters(), s.max_grad_norm)
                optimizer.step()

    def actor(self, module: Any) -> Any:
        """Return the policy of `module`, with the column "logp", for TorchRL's loss and collectors."""
        from tensordict.nn import TensorDictModule
        from torchrl.modules import ProbabilisticActor

        is_gaussian = bool(module.log_std.numel())
        outputs = ["loc", "scale"] if is_gaussian else ["logits"]
        return ProbabilisticActor(
            TensorDictModule(_Part(module, is_gaussian), in_keys=["observation"], out_keys=outputs),
            in_keys=outputs,
            distribution_class=_Normal if is_gaussian else torch.distributions.Categorical,
            return_log_prob=True,
            log_prob_key="logp",
        )

    def _build(self, module: Any) -> tuple[Any, Any, Any, Any]:
        from tensordict.nn import TensorDictModule
        from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
        from torchrl.objectives import ClipPPOLoss
        from torchrl.objectives.value import GAE

        s = self._settings
        critic = TensorDictModule(_Part(module, None), in_keys=["observation"], out_keys=["state_value"])
        loss = ClipPPOLoss(
            self.actor(module),
            critic,
            clip_epsilon=s.clip,
            entropy_bonus=False,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        loss.set_keys(sample_log_prob="logp")
        estimator = GAE(gamma=s.gamma, lmbda=s.gae_lambda, value_network=critic)
        optimizer = torch.optim.Adam(module.parameters(), lr=s.learning_rate, eps=1e-5)
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(s.most_steps), sampler=SamplerWithoutReplacement(), batch_size=s.minibatch_size
        )
        return loss, estimator, optimizer, buffer


class _Part(nn.Module):
    """The policy outputs of a module, or its values."""

    def __init__(self, module: Any, is_gaussian: bool | None) -> None:
        super().__init__()
        self.module, self._is_gaussian = module, is_gaussian

    def forward(self, obs: Tensor) -> Any:
        answer = self.module.forward_train({"obs": obs})
        if self._is_gaussian is None:
            return answer["values"][:, None]
        inputs = answer["action_dist_inputs"]
        if not self._is_gaussian:
            return inputs
        mean, log_std = inputs.chunk(2, -1)
        return mean, log_std.exp()


class _Normal(torch.distributions.Independent):
    """A Gaussian with independent components."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(torch.distributions.Normal(loc, scale), 1)


class RLlibLearner:
    """RLlib's PPO learner, with an `update(episodes=...)` as its own, which then publishes.

    `file` gets the first weights, from which the workers' module is built. The layers of that module get their names
    and their order by it at each publishing too.
    """

    def __init__(self, settings: Settings, env: str, file: Path) -> None:
        import gymnasium as gym
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

        s, made = settings, gym.make(env)
        layers = DefaultModelConfig(
            fcnet_hiddens=[64, 64],
            fcnet_activation="tanh",
            vf_share_layers=False,
            free_log_std=isinstance(made.action_space, gym.spaces.Box),
        )
        config = PPOConfig().environment(env).rl_module(model_config=layers)
        config = config.training(lr=s.learning_rate, gamma=s.gamma, lambda_=s.gae_lambda, clip_param=s.clip)
        config = config.training(grad_clip=s.max_grad_norm, vf_loss_coeff=s.value_coefficient, vf_clip_param=10_000.0)
        config = config.training(use_kl_loss=False, entropy_coeff=0.0)
        self._settings, self._file = settings, file
        self._spaces = spaces_of(made)
        self.config = config
        self._learner = config.build_learner(env=made)
        self.weights: Any = None
        self.watch: Watch | None = None
        self._save()

    def update(self, *, episodes: list[Any]) -> None:
        """Train on some episodes, and publish."""
        if episodes:
            self.train(episodes)
            self.publish()

    def train(self, episodes: list[Any]) -> None:
        """Train on some episodes."""
        s = self._settings
        assert self.watch is not None
        self.watch.add(sum(map(len, episodes)))
        self._learner.update(episodes=episodes, minibatch_size=s.minibatch_size, num_epochs=s.epochs)

    def state(self) -> Any:
        """Return the state of RLlib's module."""
        return self._learner.module["default_policy"].get_state()

    def publish(self) -> None:
        """Publish the weights by the names of Headrace's module."""
        self._save()
        self.weights.publish(rllib_policy.build(self._spaces, weights=str(self._file)).state_dict())

    def _save(self) -> None:
        rllib_policy.save_weights(self.state(), self._file)
