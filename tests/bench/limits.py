"""Simple loops that show the limits of this machine right now. None keeps counters; each reports env steps per second.

    limit 1   SyncVectorEnv, random actions, no policy
    limit 2   SyncVectorEnv, torch policy in plain ops, into preallocated arrays
    limit 3   a plain list of envs as `gym.make` gives them, random actions
    limit 4   the vector that CartPole brings along (`vector_entry_point`), torch policy, into preallocated arrays
    envpool   EnvPool's vector with a torch policy, if it is installed
    limit 5   a plain list of unwrapped envs (no time limit) and the same policy in numpy: a ceiling, not a product
    limit 6   a plain list of multi-agent envs, one call of the torch policy for all agents of all of them, no record

The policy is a 64 x 64 tanh MLP with a shared trunk: categorical sample, log-probability and value each step.
Untrained, it lets the pole fall after some 22 steps. With `balance` its episodes last 500.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from bench.multi_cartpole import MultiCartPole

ENV = "CartPole-v1"
HORIZON = 128


class Loop:
    """One loop, kept warm between its turns. `run(seconds)` returns env steps per second.

    A gymnasium vector spends a poll of an env on the reset after its episode. `resets` returns how many of the last
    `HORIZON` polls of envs that are, for they are no env steps.
    """

    def __init__(self, width: int, step: Callable[[], None], resets: Callable[[], int] = int) -> None:
        self._width = width
        self._step = step
        self._resets = resets

    def run(self, seconds: float) -> float:
        """Step for `seconds`; return the rate."""
        steps = 0
        start = time.perf_counter()
        while True:
            for _ in range(HORIZON):
                self._step()
            steps += HORIZON * self._width - self._resets()
            elapsed = time.perf_counter() - start
            if elapsed >= seconds:
                return steps / elapsed


def limit_1(width: int) -> Loop:
    """SyncVectorEnv with random actions."""
    env = sync_vector(width)
    actions = np.random.default_rng(0).integers(0, 2, (4096, width))
    turn, row, record = _counter(4096), _counter(HORIZON), arrays(width)

    def step() -> None:
        _, _, terminated, truncated, _ = env.step(actions[turn()])
        t = row()
        record["terminated"][t], record["truncated"][t] = terminated, truncated

    return Loop(width, step, lambda: ends_in(record))


def limit_2(width: int, *, balanced: bool = False) -> Loop:
    """SyncVectorEnv with a torch policy, recording into arrays."""
    return recording(sync_vector(width), width, balanced=balanced)


def limit_4(width: int) -> Loop:
    """CartPole's own vector with a torch policy, recording into arrays."""
    env = gym.make_vec(ENV, num_envs=width, vectorization_mode="vector_entry_point")
    return recording(env, width)


def envpool_loop(width: int) -> Loop:
    """EnvPool's CartPole with a torch policy, recording into arrays."""
    return recording(make_envpool(width), width)


def make_envpool(width: int) -> Any:
    """EnvPool's CartPole, stepped in this thread like all other loops."""
    import envpool

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # gymnasium warns that EnvPool's bounds have a higher precision
        return envpool.make_gymnasium(ENV, num_envs=width, num_threads=1, seed=0)


def recording(env: Any, width: int, *, balanced: bool = False) -> Loop:
    """A gymnasium vector with a torch policy, recording into arrays."""
    policy = TorchPolicy()
    if balanced:
        policy.balance()
    record = arrays(width)
    turn = _counter(HORIZON)
    obs, _ = env.reset()

    def step() -> None:
        nonlocal obs
        obs = record_step(env, policy, obs, record, turn())

    return Loop(width, step, lambda: ends_in(record))


def ends_in(record: dict[str, Any]) -> int:
    """Return how many episodes end in `record`. The vector spends the env's next poll on its reset."""
    return int(np.count_nonzero(record["terminated"] | record["truncated"]))


def record_step(env: Any, policy: TorchPolicy, obs: Any, record: dict[str, Any], t: int) -> Any:
    """Write one step of all envs into row `t` of `record`; return the next observations."""
    with torch.inference_mode():
        action, logp, value = policy(torch.from_numpy(obs))
    actions = action.numpy()
    record["obs"][t] = obs
    record["actions"][t] = actions
    record["logp"][t] = logp.numpy()
    record["values"][t] = value.numpy()
    obs, reward, terminated, truncated, _ = env.step(actions)
    record["rewards"][t] = reward
    record["terminated"][t] = terminated
    record["truncated"][t] = truncated
    return obs


def limit_3(width: int) -> Loop:
    """A list of envs with gymnasium's own wrappers and random actions."""
    envs = [gym.make(ENV) for _ in range(width)]
    for env in envs:
        env.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (4096, width)).tolist()
    turn = _counter(4096)

    def step() -> None:
        for env, action in zip(envs, actions[turn()], strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return Loop(width, step)


def limit_5(width: int) -> Loop:
    """A list of unwrapped envs with a numpy policy."""
    envs: list[Any] = [gym.make(ENV).unwrapped for _ in range(width)]
    obs = np.stack([env.reset(seed=0)[0] for env in envs])
    policy = NumpyPolicy()

    def step() -> None:
        actions, _, _ = policy(obs)
        for i, (env, action) in enumerate(zip(envs, actions.tolist(), strict=True)):
            row, _, terminated, _, _ = env.step(action)
            obs[i] = env.reset()[0] if terminated else row

    return Loop(width, step)


def limit_6(width: int, agents: int) -> Loop:
    """A list of dict envs with a torch policy. An env step of all agents counts once."""
    envs = [MultiCartPole({"agents": agents}) for _ in range(width)]
    seen = [env.reset(seed=index)[0] for index, env in enumerate(envs)]
    policy = TorchPolicy()

    def step() -> None:
        obs = np.stack([row for observations in seen for row in observations.values()])
        with torch.inference_mode():
            actions, _, _ = policy(torch.from_numpy(obs))
        flat = iter(actions.tolist())
        for index, env in enumerate(envs):
            observations, _, terminateds, truncateds, _ = env.step({agent: next(flat) for agent in seen[index]})
            if terminateds["__all__"]:
                seen[index] = env.reset()[0]
            else:
                done = {agent for agent in observations if terminateds[agent] or truncateds[agent]}
                seen[index] = {agent: row for agent, row in observations.items() if agent not in done}

    return Loop(width, step)


class TorchPolicy:
    """Plain ops on tensors, eager."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._trunk = torch.nn.Sequential(
            torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()
        )
        self._policy, self._value = torch.nn.Linear(64, 2), torch.nn.Linear(64, 1)

    def balance(self) -> None:
        """Hold the pole."""
        balance(self._trunk[0], self._trunk[2], self._policy)

    def __call__(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self._trunk(obs)
        logits = torch.log_softmax(self._policy(hidden), -1)
        action = torch.multinomial(logits.exp(), 1)
        return action[:, 0], logits.gather(-1, action)[:, 0], self._value(hidden)[:, 0]


def balance(first: Any, second: Any, head: Any) -> None:
    """Set the layers so that the policy pushes the cart to where the pole falls: episodes last 500 steps.

    One unit of each layer sums up where cart and pole are and move, and decides. The head's first two rows are logits.
    """
    with torch.no_grad():
        for layer in (first, second, head):
            layer.bias.zero_()
        first.weight[0] = torch.tensor([0.02, 0.1, 1.0, 0.5])
        second.weight[0], head.weight[:2] = 0.0, 0.0
        second.weight[0, 0], head.weight[0, 0], head.weight[1, 0] = 1.0, -1000.0, 1000.0


class NumpyPolicy:
    """The same policy in numpy."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        sizes = ((4, 64), (64, 64), (64, 2), (64, 1))
        self._weights = [
            (self._random.standard_normal(s, np.float32) / s[0] ** 0.5, np.zeros(s[1], np.float32)) for s in sizes
        ]

    def __call__(self, obs: Any) -> tuple[Any, Any, Any]:
        (w1, b1), (w2, b2), (wp, bp), (wv, bv) = self._weights
        hidden = np.tanh(np.tanh(obs @ w1 + b1) @ w2 + b2)
        logits = hidden @ wp + bp
        mass = np.exp(logits - logits.max(1, keepdims=True))
        cdf = mass.cumsum(1) / mass.sum(1, keepdims=True)
        action = (cdf[:, :-1] <= self._random.random((len(obs), 1))).sum(1)
        rows = np.arange(len(obs))
        return action, np.log(mass[rows, action] / mass.sum(1)), (hidden @ wv + bv)[:, 0]


def sync_vector(width: int) -> Any:
    """gymnasium's own vector, in this process."""
    env = gym.vector.SyncVectorEnv([lambda: gym.make(ENV) for _ in range(width)])
    env.reset(seed=0)
    return env


def arrays(width: int, horizon: int = HORIZON) -> dict[str, Any]:
    """Arrays for all that a policy step and an env step return, by name: (horizon, width, ...)."""
    kinds = {"actions": np.int64, "logp": np.float32, "values": np.float32, "rewards": np.float64}
    record: dict[str, Any] = {name: np.empty((horizon, width), kind) for name, kind in kinds.items()}
    record["obs"] = np.empty((horizon, width, 4), np.float32)
    record["terminated"] = np.empty((horizon, width), bool)
    record["truncated"] = np.empty((horizon, width), bool)
    return record


def _counter(period: int) -> Callable[[], int]:
    at = -1

    def turn() -> int:
        nonlocal at
        at = (at + 1) % period
        return at

    return turn
