"""Random episodes of several agents that know what must come of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from support.serving.served_agents import rule


class Life:
    """One random episode: agents come late, pause, leave for good, some end truncated. Knows what must come of it."""

    def __init__(self, seed: int, agents: Iterable[str]) -> None:
        self._rng = np.random.default_rng(seed)
        self._agents = list(agents)
        self.seed = seed
        self.seen: dict[str, list[list[float]]] = defaultdict(list)
        self.actions: dict[str, list[int]] = defaultdict(list)
        self.rewards: dict[str, list[float]] = defaultdict(list)
        self.ends: dict[str, str] = {}
        self._pending: dict[str, float] = defaultdict(float)
        self._acted: set[str] = set()

    def play(self, client: Any, steps: int = 20) -> Life:
        """By `step` of a plain way, several rewards and ends a message as they fall."""
        name = f"life-{self.seed}"
        client.start(name)
        news: dict[str, Any] = {}
        for t in range(steps):
            seen = self._observe(t, news)
            answer = client.step(name, t, seen, **news)
            acting = [agent for agent in seen if agent not in self.ends]
            assert answer["action"] == {agent: rule(seen[agent]) for agent in acting}
            for agent in acting:
                self.actions[agent].append(answer["action"][agent])
            self._acted.update(acting)
            news = self._happen()
        last = {agent: self._see(agent, steps) for agent in self._agents if agent not in self.ends}
        last |= {agent: self._see(agent, steps) for agent in news["truncated"]}
        for agent in news["terminated"]:
            self._settle(agent)
        client.step(name, steps, last, **news, end="truncated")
        return self

    def _observe(self, t: int, news: dict[str, Any]) -> dict[str, list[float]]:
        """Somebody who is not done is always there, and whoever was truncated just now."""
        there = [agent for agent in self._agents if agent not in self.ends]
        some = [agent for agent in there if self._rng.random() < 0.6] or there[:1]
        ending = [*news.get("truncated", ()), *(a for a in news.get("terminated", ()) if self._rng.random() < 0.5)]
        for agent in set(news.get("terminated", ())) - set(ending):
            self._settle(agent)
        return {agent: self._see(agent, t) for agent in [*some, *ending]}

    def _see(self, agent: str, t: int) -> list[float]:
        seen = [float(t), float(self.seed)]
        self.seen[agent].append(seen)
        self._settle(agent)
        return seen

    def _settle(self, agent: str) -> None:
        if self.actions[agent] and len(self.rewards[agent]) < len(self.actions[agent]):
            self.rewards[agent].append(self._pending.pop(agent, 0.0))

    def _happen(self) -> dict[str, Any]:
        news: dict[str, Any] = {"reward": {}, "terminated": {}, "truncated": {}}
        for agent in self._agents:
            if agent in self.ends:
                continue
            if self._rng.random() < 0.7:
                news["reward"][agent] = float(self._rng.integers(-5, 6))
                self._pending[agent] += news["reward"][agent]
            others = [other for other in self._agents if other != agent and other not in self.ends]
            if agent in self._acted and others and self._rng.random() < 0.05:
                self.ends[agent] = str(self._rng.choice(["terminated", "truncated"]))
                news[self.ends[agent]][agent] = True
        return news


def check(chunks: list[EpisodeChunk], lives: Iterable[Life]) -> None:
    """The chunks tell each agent's life, to the number."""
    parts: dict[tuple[float, str], list[EpisodeChunk]] = defaultdict(list)
    for chunk in chunks:
        parts[float(chunk.obs[0, 1]), chunk.agent_id].append(chunk)
    for life in lives:
        for agent, actions in life.actions.items():
            if not actions:
                continue
            whole = to_episode(parts.pop((float(life.seed), agent)))
            assert whole.actions.tolist() == actions
            assert whole.rewards.tolist() == life.rewards[agent]
            last = [] if len(life.seen[agent]) > len(actions) else life.seen[agent][-1:]  # it got no last one
            assert whole.obs.tolist() == [*life.seen[agent], *last]
            ends = {"terminated": ChunkEnd.TERMINATED, "truncated": ChunkEnd.TRUNCATED}
            assert whole.end is ends[life.ends.get(agent, "truncated")]
            assert set(whole.weights_seq.tolist()) == {1}
    assert not parts
