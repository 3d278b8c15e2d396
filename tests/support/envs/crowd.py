"""Multi-agent envs that other processes can build: all that agents may do, and all that an env may do wrong."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from headrace.workers import EnvContext, MultiAgentEnv
from support.envs.troubled import FAULTS as OF_ONE

MASKED: Any = gym.spaces.Dict(
    {"at": gym.spaces.Box(1.0, 2.0, (2,), np.float32), "action_mask": gym.spaces.MultiBinary(3)}
)
PLAIN: Any = gym.spaces.Box(-1e3, 1e3, (3,), np.float32)
CHOICE: Any = gym.spaces.Discrete(3)
PUSH: Any = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


def policy_of(agent: Any, episode_id: str) -> str:
    """The mapping for `Crowd`."""
    return "masked" if agent in ("red/1", "blue") else "pushes"


class Crowd(MultiAgentEnv):
    """Who is seen, rewarded and done is drawn from the seed. Observations and rewards depend on what was done, too.

    The first env of a lane does what `config["faults"]` says, {lane: {place: fault}}; "step" is the sixth of all.
    Each step takes less than `config["late_ms"]`, if that is given.
    """

    possible_agents = ("red/1", 3, "blue", "late")
    observation_spaces: ClassVar[Any] = {"red/1": MASKED, "blue": MASKED, 3: PLAIN, "late": PLAIN}
    action_spaces: ClassVar[Any] = {"red/1": CHOICE, "blue": CHOICE, 3: PUSH, "late": PUSH}

    def __init__(self, context: EnvContext) -> None:
        self.context = context
        faults = {} if context.recreated else context.get("faults", {})
        self._faults = faults.get(str(context.vector_index), {})
        self._steps = 0
        self._maybe("construction")

    def _maybe(self, at: str, answer: Any = None) -> Any:
        return FAULTS[self._faults[at]](answer, self.context) if at in self._faults else answer

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.random = np.random.default_rng(seed)
        self.time, self.sum, self.done, self.seen, self.waiting = 0, 0.0, set(), set(), set()
        first = [agent for agent in self.possible_agents[::-1] if agent != "late" and self.random.random() < 0.8]
        infos = {agent: {"seed": seed % 1000} for agent in first if self.random.random() < 0.5} if seed else {}
        return self._maybe("reset", ({agent: self._see(agent) for agent in first}, infos))

    def _see(self, agent: Any) -> Any:
        self.seen.add(agent)
        self.waiting.add(agent)
        if self.observation_spaces[agent] is PLAIN:
            return (self.random.normal(size=3) + self.sum % 7).astype(np.float32)
        mask = np.array([1, *self.random.integers(0, 2, 2)], np.int8)
        return {"at": self.random.uniform(1, 2, 2).astype(np.float32), "action_mask": mask}

    def step(self, actions: dict[Any, Any]) -> Any:
        assert set(actions) == self.waiting - self.done, "those with an observation act, and nobody else"
        self._steps += 1
        self.time += 1
        if "late_ms" in self.context:
            time.sleep(
                zlib.crc32(f"{self.context.vector_index} {self._steps}".encode()) % self.context["late_ms"] / 1e3
            )
        self.waiting = set()
        self.sum += sum(float(np.sum(action)) for action in actions.values())
        seen, rewards, terminateds, truncateds, infos = {}, {}, {}, {}, {}
        for agent in self.random.permutation(np.array(self.possible_agents, object)).tolist():
            if agent in self.done:
                continue
            if self.random.random() < 0.7:
                rewards[agent] = self.sum + float(self.random.integers(-5, 6))
            fate = self.random.random()
            if agent in self.seen and fate < 0.06:
                (terminateds if fate < 0.03 else truncateds)[agent] = True
                self.done.add(agent)
            if self.random.random() < 0.8 and (agent != "late" or self.time > 2):
                seen[agent] = self._see(agent)
                if self.random.random() < 0.3:
                    infos[agent] = {"sum": self.sum, "legal": [True, False]}
        over = len(self.done) >= 3 or self.random.random() < 0.05
        terminateds["__all__"], truncateds["__all__"] = bool(over and self.sum > 0), bool(over and self.sum <= 0)
        answer = seen, rewards, terminateds, truncateds, infos
        return self._maybe("step", answer) if self._steps == 6 else answer

    def close(self) -> None:
        self._maybe("close")


class Ids(MultiAgentEnv):
    """One agent, whose id no other process can be told."""

    possible_agents = ((1, 2),)
    observation_spaces: ClassVar[Any] = {(1, 2): PLAIN}
    action_spaces: ClassVar[Any] = {(1, 2): PUSH}


def _change(part: int, agent: Any, value: Any) -> Callable[[Any, Any], Any]:
    return lambda answer, _: tuple({**piece, agent: value} if i == part else piece for i, piece in enumerate(answer))


FAULTS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: OF_ONE[name] for name in ("raises", "asks", "hangs", "hangs with the lock", "segfaults", "exits")},
    "four parts": lambda answer, _: answer[:4],
    "no dicts": lambda answer, _: (1, *answer[1:]),
    "no word of all": lambda answer, _: (*answer[:2], {}, *answer[3:]),
    "NaN reward": _change(1, 3, float("nan")),
    "array reward": _change(1, "blue", np.array([1.0])),
    "reward of nobody": _change(1, "who", 1.0),
    "observation of wrong shape": _change(0, 3, np.zeros(4, np.float32)),
    "observation of wrong dtype": _change(0, 3, np.zeros(3)),
    "observation outside": _change(0, 3, np.full(3, np.inf, np.float32)),
    "NaN within": _change(0, "red/1", {"at": np.full(2, np.nan, np.float32), "action_mask": np.ones(3, np.int8)}),
    "observation of nobody": _change(0, "who", np.zeros(3, np.float32)),
    "flag": _change(2, "blue", "yes"),
    "list info": _change(4, "blue", [1]),
    "info that is no JSON": _change(4, "blue", {"made": object()}),
}
