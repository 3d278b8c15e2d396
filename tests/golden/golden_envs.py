"""Envs for the golden chunks. They compute with small integers only, so every machine gives the same bits.

An env walks on integers that follow from its seed and its actions. `config["faults"]` says what its first life does
wrong: {env index: {"step": {number: fault}, "reset": {number: fault}}}, numbers counted over that life and as text.
Lives that replace it do what `config["again"]` says. This module needs no torch, so that env processes start fast.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from headrace.workers import EnvContext, MultiAgentEnv, StepFailedRecreateEnv, VectorEnv
from headrace.workers.external import ExternalEnv, ExternalMultiAgentEnv

MODULUS = 256


def _raise(answer: Any) -> Any:
    raise RuntimeError("diverged")


def _recreate(answer: Any) -> Any:
    raise StepFailedRecreateEnv


def _hang(answer: Any) -> Any:
    threading.Event().wait()


def _kill(answer: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(answer: Any) -> Any:
    os._exit(7)


def _changed(part: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a fault that changes one part of an answer; of several agents, the part of the last one."""

    def apply(answer: Any) -> Any:
        value = answer[part]
        if isinstance(value, dict) and isinstance(answer[0], dict) and value:
            last = list(value)[-1]
            value = {**value, last: change(value[last])}
        else:
            value = change(value)
        return (*answer[:part], value, *answer[part + 1 :])

    return apply


def _moved(by: float) -> Callable[[Any], Any]:
    def apply(observation: Any) -> Any:
        if isinstance(observation, dict):
            return {**observation, "at": observation["at"] + np.float32(by)}
        return observation + np.float32(by)

    return apply


FAULTS: dict[str, Callable[[Any], Any]] = {
    "raise": _raise,
    "recreate": _recreate,
    "hang": _hang,
    "kill": _kill,
    "exit": _exit,
    "nan reward": _changed(1, lambda _: float("nan")),
    "wrong shape": _changed(0, lambda _: np.zeros(9, np.float32)),
    "wrong dtype": _changed(0, lambda _: np.zeros(3, np.complex128)),
    "outside": _changed(0, _moved(np.inf)),
    "outside, finite": _changed(0, _moved(1e6)),
    "list info": lambda answer: (*answer[:-1], [1]),
    "four parts": lambda answer: answer[:4],
}
ANY = ("raise", "wrong shape", "recreate", "nan reward", "list info", "wrong dtype", "outside", "four parts")
"""What the fault "any" may be, by chance of the walk."""


class Faults:
    """The fault of one life of one env, and its time."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        table = context.get("again" if getattr(context, "recreated", False) else "faults", {})
        self._table = table.get(str(getattr(context, "vector_index", 0)), {})
        self._calls = {"step": 0, "reset": 0}

    def apply(self, call: str, answer: Any, chance: int) -> Any:
        """Return the answer of `call`, or what the fault of this number makes of it."""
        number = self._calls[call]
        self._calls[call] += 1
        fault = self._table.get(call, {}).get(str(number))
        fault = ANY[chance % len(ANY)] if fault == "any" else fault
        return FAULTS[fault](answer) if fault else answer


class Walk(gym.Env[Any, Any]):
    """Obs: (sum, time, env index) as float32. Episodes end by chance, or are truncated after `config["limit"]` steps.

    Every third step has an info, and so has every reset.
    """

    observation_space: Any = gym.spaces.Box(-1000.0, 1000.0, (3,), np.float32)
    action_space: Any = gym.spaces.Discrete(5, start=-1)

    def __init__(self, config: Any = None) -> None:
        self.config: Any = {} if config is None else config
        self.index = getattr(config, "vector_index", 0)
        self._faults = Faults(self.config)
        self._limit = self.config.get("limit", 20)
        self._odds = self.config.get("odds", 9)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        elif not hasattr(self, "_random"):
            self._random = np.random.default_rng(self.index)
        self.time = 0
        self.sum = int(self._random.integers(0, MODULUS))
        return self._faults.apply("reset", (self.observe(), {"began": self.sum}), self.sum)

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.time += 1
        self.sum = (5 * self.sum + self.weigh(action) + int(self._random.integers(0, 7))) % MODULUS
        over = bool(self._random.integers(0, self._odds) == 0)
        info = {"time": self.time, "deep": {"word": f"{self.index}-{self.sum}"}} if self.time % 3 == 0 else {}
        answer = self.observe(), (self.sum - 128) / 4, over, not over and self.time >= self._limit, info
        return self._faults.apply("step", answer, self.sum)

    def observe(self) -> Any:
        return np.array([self.sum / 2, self.time, self.index], np.float32)

    def weigh(self, action: Any) -> int:
        """Return an integer that follows from the action."""
        return int(action)


class Told(Walk):
    """A walk that observes what its creator was told."""

    observation_space: Any = gym.spaces.Box(-np.inf, np.inf, (7,), np.float64)

    def observe(self) -> Any:
        c = self.config
        told = (c.worker_index, c.num_workers, c.vector_index, c.num_envs, (c.seed or 0) % 1000)
        return np.array([*told, self.sum, self.time], np.float64)


class Picture(Walk):
    """A walk that observes a small picture."""

    observation_space: Any = gym.spaces.Box(0, 255, (6, 6, 1), np.uint8)
    action_space: Any = gym.spaces.Discrete(3)

    def observe(self) -> Any:
        return (np.arange(36).reshape(6, 6, 1) * (self.time + 1) + self.sum).astype(np.uint8)


class Nested(Walk):
    """A walk with Dict and Tuple spaces on both sides, and leaves of every kind."""

    observation_space: Any = gym.spaces.Dict(
        {
            "arm": gym.spaces.Tuple((gym.spaces.Box(-64.0, 64.0, (2, 2), np.float32), gym.spaces.Discrete(9, start=2))),
            "bits": gym.spaces.MultiBinary(3),
            "pair": gym.spaces.MultiDiscrete([4, 6]),
        }
    )
    action_space: Any = gym.spaces.Dict(
        {
            "gear": gym.spaces.MultiDiscrete([3, 4]),
            "push": gym.spaces.Tuple((gym.spaces.Box(-1.0, 1.0, (2,), np.float32), gym.spaces.Discrete(3))),
            "flags": gym.spaces.MultiBinary(2),
        }
    )

    def observe(self) -> Any:
        return {
            "arm": (np.full((2, 2), self.sum % 64 / 4, np.float32), np.int64(2 + self.sum % 9)),
            "bits": np.array([self.sum & 1, self.sum >> 1 & 1, self.time & 1], np.int8),
            "pair": np.array([self.sum % 4, self.time % 6], np.int64),
        }

    def weigh(self, action: Any) -> int:
        push, turn = action["push"]
        return int(action["gear"].sum()) + int(np.rint(push.sum() * 8)) + int(turn) + int(action["flags"].sum())


class Push(Walk):
    """A walk with a Box action whose bounds differ, and float64 observations."""

    observation_space: Any = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space: Any = gym.spaces.Box(np.array([-1.0, -0.5], np.float32), np.array([2.0, 0.5], np.float32))

    def observe(self) -> Any:
        return np.array([self.sum / 8, -self.time], np.float64)

    def weigh(self, action: Any) -> int:
        return int(np.rint(float(action[0]) * 16 + float(action[1]) * 32))


class Choices(Walk):
    """A walk with a MultiDiscrete action, and a Discrete observation that starts at 3."""

    observation_space: Any = gym.spaces.Discrete(MODULUS, start=3)
    action_space: Any = gym.spaces.MultiDiscrete([3, 2, 5])

    def observe(self) -> Any:
        return np.int64(3 + self.sum)

    def weigh(self, action: Any) -> int:
        return int((action * np.array([1, 3, 6])).sum())


class Jittery(Walk):
    """A walk whose steps take a few milliseconds, more or less by env and time."""

    def step(self, action: Any) -> Any:
        threading.Event().wait((7 * self.index + 3 * self.time) % 4 / 1000)
        return super().step(action)


class OwnVector(VectorEnv):
    """A user's own vector of walks. Step `config["all"]` raises; an env that fails answers with its exception."""

    def __init__(self, context: EnvContext) -> None:
        self._context = context
        self._envs = [Walk(context.at(index)) for index in range(context.num_envs)]
        self._calls = 0
        super().__init__(Walk.observation_space, Walk.action_space, context.num_envs)

    def reset_at(self, index: int | None = None, *, seed: int | None = None, options: Any = None) -> Any:
        return self._envs[index or 0].reset(seed=seed)

    def restart_at(self, index: int | None = None) -> None:
        again = self._context.at(index or 0)
        again.recreated = True
        self._envs[index or 0] = Walk(again)

    def vector_step(self, actions: Sequence[Any]) -> Any:
        self._calls += 1
        if self._calls == self._context.get("all"):
            raise RuntimeError("all of us")
        rows = [self._step(env, action) for env, action in zip(self._envs, actions, strict=True)]
        return tuple(list(part) for part in zip(*rows, strict=True))

    def _step(self, env: Walk, action: Any) -> Any:
        if action is None:
            return None, 0.0, False, False, {}
        try:
            return env.step(action)
        except RuntimeError as error:
            return error, 0.0, False, False, {}


def wrapped(context: EnvContext) -> VectorEnv:
    """Return the vector that `VectorEnv.wrap` makes of walks."""

    def make(index: int) -> Walk:
        return Walk(context.at(index))

    return VectorEnv.wrap(make, num_envs=context.num_envs)


VECTORS: dict[str, Any] = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}


def vector_of(env: Callable[[EnvContext], Any], kind: str, mode: str) -> Callable[[EnvContext], Any]:
    """Return a creator of gymnasium's own vector of `env`s, with this autoreset mode."""

    def create(context: EnvContext) -> Any:
        makers = [partial(env, context.at(index)) for index in range(context.num_envs)]
        return VECTORS[kind](makers, autoreset_mode=AutoresetMode(mode))

    return create


class Rows(gym.vector.VectorEnv[Any, Any, Any]):
    """A gymnasium vector that steps rows of numbers at once, and resets a row in the step after its end."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 1, limit: int = 8, **_: Any) -> None:
        self.num_envs, self._limit = num_envs, limit
        self.single_observation_space = gym.spaces.Box(-1000.0, 1000.0, (2,), np.float32)
        self.single_action_space = gym.spaces.Discrete(4)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._over = np.zeros(num_envs, np.bool_)
        self._sums, self._times = np.zeros((2, num_envs), np.int64)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self._random = np.random.default_rng(seed if isinstance(seed, int) else list(seed))
        self._begin(np.ones(self.num_envs, np.bool_))
        return self._observe(), {}

    def _begin(self, rows: Any) -> None:
        self._sums[rows] = self._random.integers(0, MODULUS, self.num_envs)[rows]
        self._times[rows] = 0
        self._over[rows] = False

    def _observe(self) -> Any:
        return np.stack((self._sums / 2, self._times), 1).astype(np.float32)

    def step(self, actions: Any) -> Any:
        begins = self._over.copy()
        self._times += 1
        self._sums = (3 * self._sums + actions + self._random.integers(0, 5, self.num_envs)) % MODULUS
        self._begin(begins)
        terminated = ~begins & (self._sums % 11 == 0)
        truncated = ~begins & ~terminated & (self._times >= self._limit + np.arange(self.num_envs))
        self._over = terminated | truncated
        return self._observe(), np.where(begins, 0.0, self._sums / 4), terminated, truncated, {}


class Pool(Rows):
    """A stand-in for EnvPool, which answers for `config["batch_size"]` envs at a time, the first that were told.

    It is seeded when it is made. `config["fails"]` is the number of the answer that it raises in place of.
    """

    __module__ = "envpool.stand_in"  # by which a vector is taken for EnvPool's

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context.num_envs)
        self.config = {"batch_size": context.get("batch_size", context.num_envs)}
        self._random = np.random.default_rng(context.seed)
        self._answers: list[Any] = []
        self._left = 0 if context.recreated else context.get("fails", 0)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        assert seed is None
        return super().reset()

    def send(self, actions: Any, lanes: Any) -> None:
        for lane, action in zip(lanes.tolist(), actions.tolist(), strict=True):
            self._times[lane] += 1
            self._sums[lane] = (3 * self._sums[lane] + action + self._random.integers(0, 5)) % MODULUS
            terminated = bool(self._sums[lane] % 11 == 0)
            truncated = not terminated and bool(self._times[lane] >= self._limit + lane)
            self._tell(lane, self._sums[lane] / 4, terminated, truncated)

    def _reset(self, lanes: Any) -> None:
        for lane in lanes.tolist():
            self._sums[lane], self._times[lane] = self._random.integers(0, MODULUS), 0
            self._tell(lane, 0.0, False, False)

    def _tell(self, lane: int, reward: float, terminated: bool, truncated: bool) -> None:
        self._answers.append((self._observe()[lane], reward, terminated, truncated, lane))

    def recv(self) -> Any:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("the pool is gone")
        size = self.config["batch_size"]
        told, self._answers = self._answers[:size], self._answers[size:]
        observations, rewards, terminated, truncated, lanes = map(np.array, zip(*told, strict=True))
        return observations, rewards, terminated, truncated, {"env_id": lanes}


class Serving(ExternalEnv):
    """Plays one episode after another in its own thread, and logs every `config["logged"]`th action by itself.

    `config["untrained"]`: every fifth episode is not to be trained on. `config["fails"]`: episodes before `run` raises.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(Walk.action_space, Walk.observation_space)
        self.config = config
        self._recreated = config.recreated

    def run(self) -> None:
        for number in range(1_000_000):
            if number == self.config.get("fails") and not self._recreated:
                raise RuntimeError("the simulator is gone")
            self._play(number)

    def _play(self, number: int) -> None:
        walk = Walk(self.config)
        trains = not self.config.get("untrained") or number % 5 != 4
        episode = self.start_episode(training_enabled=trains)
        observation, _ = walk.reset(seed=number)
        over = truncated = False
        while not over and not truncated:
            action = self._act(episode, observation, walk.time)
            observation, reward, over, truncated, info = walk.step(action)
            self.log_returns(episode, reward / 2)
            self.log_returns(episode, reward / 2, info)
        self.end_episode(episode, observation, truncated=truncated)

    def _act(self, episode: str, observation: Any, time: int) -> Any:
        every = self.config.get("logged")
        if every and time % every == 0:
            self.log_action(episode, observation, np.int64(time % 5 - 1))
            return time % 5 - 1
        return self.get_action(episode, observation)


LOGGED: dict[Any, Any] = {
    "red/1": np.int64(1),
    3: np.array([0.25, -0.5], np.float32),
    "blue": np.int64(1),
    "late": np.zeros(2, np.float32),
}
"""An action that each agent of a `Crowd` may always take."""


class ServingAgents(ExternalMultiAgentEnv):
    """Plays one episode of a `Crowd` after another in its own thread; some actions are logged, as in `Serving`."""

    def __init__(self, config: Any) -> None:
        super().__init__(Crowd.action_spaces, Crowd.observation_spaces)
        self.config = config

    def run(self) -> None:
        for number in range(1_000_000):
            self._play(number)

    def _play(self, number: int) -> None:
        crowd = Crowd(self.config)
        episode = self.start_episode()
        observations, infos = crowd.reset(seed=number)
        over = truncated = False
        while True:
            acting = {agent: seen for agent, seen in observations.items() if agent not in crowd.done}
            actions = self._act(episode, observations, acting, crowd.time) if acting else {}
            observations, rewards, terminateds, truncateds, infos = crowd.step(actions)
            over, truncated = terminateds.pop("__all__"), truncateds.pop("__all__")
            self.log_returns(episode, rewards, infos, terminateds, truncateds)
            if over or truncated:
                return self.end_episode(episode, observations, truncated=truncated)

    def _act(self, episode: str, observations: Any, acting: Any, time: int) -> Any:
        every = self.config.get("logged")
        if every and time % every == 0:
            actions = {
                agent: np.int64(1) if agent in ("red/1", "blue") else np.zeros(2, np.float32) for agent in acting
            }
            self.log_action(episode, observations, actions)
            return actions
        return self.get_action(episode, observations)


class Idle(ExternalEnv):
    """Waits while a script drives its episodes, which finds the newest such env in `newest`."""

    newest: ClassVar[list[Idle]] = []

    def __init__(self, config: Any) -> None:
        super().__init__(Walk.action_space, Walk.observation_space)
        self._closed = threading.Event()
        self.newest[:] = [self]

    def run(self) -> None:
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()


# -- several agents ---------------------------------------------------------------------------------------------------

PLAIN: Any = gym.spaces.Box(-1000.0, 1000.0, (3,), np.float32)
MASKED: Any = gym.spaces.Dict(
    {"at": gym.spaces.Box(-1000.0, 1000.0, (2,), np.float32), "action_mask": gym.spaces.MultiBinary(4)}
)
CHOICE: Any = gym.spaces.Discrete(4)
SHOVE: Any = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


class Together(MultiAgentEnv):
    """Three agents that all act in every step until the episode ends for all of them."""

    possible_agents = ("x", "y", "z")
    observation_spaces: ClassVar[Any] = dict.fromkeys(possible_agents, PLAIN)
    action_spaces: ClassVar[Any] = dict.fromkeys(possible_agents, CHOICE)

    def __init__(self, config: Any = None) -> None:
        self.config: Any = {} if config is None else config
        self.index = getattr(config, "vector_index", 0)
        self._faults = Faults(self.config)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.random = np.random.default_rng(seed)
        self.time, self.sum = 0, int(self.random.integers(0, MODULUS))
        return self._faults.apply("reset", (self._observe(), {}), self.sum)

    def _observe(self) -> Any:
        return {a: np.array([self.sum / 2, self.time, i], np.float32) for i, a in enumerate(self.possible_agents)}

    def step(self, actions: dict[Any, Any]) -> Any:
        self.time += 1
        self.sum = (3 * self.sum + sum(int(a) for a in actions.values()) + int(self.random.integers(0, 5))) % MODULUS
        rewards = {agent: (self.sum + i) / 4 for i, agent in enumerate(self.possible_agents)}
        over = bool(self.random.integers(0, 8) == 0)
        late = self.time >= self.config.get("limit", 12) and not over
        infos = {"y": {"sum": self.sum}} if self.time % 2 else {}
        answer = self._observe(), rewards, {"__all__": over}, {"__all__": late}, infos
        return self._faults.apply("step", answer, self.sum)


class Crowd(MultiAgentEnv):
    """Agents that come late, pause, return and end by chance. Some have action masks, one has another action space."""

    possible_agents = ("red/1", 3, "blue", "late")
    observation_spaces: ClassVar[Any] = {"red/1": MASKED, 3: PLAIN, "blue": MASKED, "late": PLAIN}
    action_spaces: ClassVar[Any] = {"red/1": CHOICE, 3: SHOVE, "blue": CHOICE, "late": SHOVE}

    def __init__(self, config: Any = None) -> None:
        self.config: Any = {} if config is None else config
        self.index = getattr(config, "vector_index", 0)
        self._faults = Faults(self.config)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.random = np.random.default_rng(seed)
        self.time, self.sum = 0, int(self.random.integers(0, MODULUS))
        self.done: set[Any] = set()
        self.seen: set[Any] = set()
        first = [a for a in self.possible_agents if a != "late" and self.chance(8)] or ["blue"]
        observations = {agent: self._see(agent) for agent in first}
        return self._faults.apply("reset", (observations, {first[0]: {"began": self.sum}}), self.sum)

    def chance(self, of_ten: int) -> bool:
        return bool(self.random.integers(0, 10) < of_ten)

    def _see(self, agent: Any) -> Any:
        self.seen.add(agent)
        if self.observation_spaces[agent] is PLAIN:
            return np.array([self.sum / 2, self.time, self.index], np.float32)
        mask = np.array([self.random.integers(0, 2), 1, *self.random.integers(0, 2, 2)], np.int8)
        return {"at": np.array([self.sum / 4, self.time], np.float32), "action_mask": mask}

    def step(self, actions: dict[Any, Any]) -> Any:
        self.time += 1
        told = sum(int(np.rint(np.sum(np.asarray(action, np.float64) * 8))) for action in actions.values())
        self.sum = (3 * self.sum + told + int(self.random.integers(0, 5))) % MODULUS
        seen, rewards, terminateds, truncateds, infos = {}, {}, {}, {}, {}
        for agent in self.possible_agents:
            if agent in self.done:
                continue
            if self.chance(7):
                rewards[agent] = (self.sum - 128 + int(self.random.integers(0, 9))) / 4
            ends = agent in self.seen and bool(self.random.integers(0, 20) == 0)
            if ends:
                (terminateds if self.chance(5) else truncateds)[agent] = True
                self.done.add(agent)
            if self.chance(self.config.get("seen", 8)) and (agent != "late" or self.time > 2):
                seen[agent] = self._see(agent)
                if self.chance(3):
                    infos[agent] = {"sum": self.sum, "legal": [True, False]}
        over = len(self.done) >= 3 or bool(self.random.integers(0, 15) == 0)
        terminateds["__all__"], truncateds["__all__"] = over and self.sum % 2 == 0, over and self.sum % 2 == 1
        return self._faults.apply("step", (seen, rewards, terminateds, truncateds, infos), self.sum)


class JitteryTogether(Together):
    """Agents in an env whose steps take a few milliseconds, more or less by env and time."""

    def step(self, actions: dict[Any, Any]) -> Any:
        threading.Event().wait((5 * self.index + 3 * self.time) % 4 / 1000)
        return super().step(actions)


def policy_of(agent: Any, episode_id: str) -> str:
    """Return the policy for an agent of a `Crowd`."""
    return "masked" if agent in ("red/1", "blue") else "shoves"


def changing_policy_of(agent: Any, episode_id: str) -> str:
    """Return one of two policies for an agent of a `Together`; it changes from episode to episode."""
    return "left" if (int(episode_id[-4:], 16) + len(str(agent)) + (agent == "y")) % 2 else "right"
