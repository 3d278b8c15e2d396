"""A policy server without a fleet: the code that serves clients in a worker, by weights that stay as they are.

What clients live through is summed up and given to nobody.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.config import FleetConfig
from headrace.schemas.ledger import Discard
from headrace.schemas.messages import Version
from headrace.schemas.weights import Arrays
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.connectors.vector_connectors import PIPELINES
from headrace.workers.runner.multi_agent_env_runner import MultiAgentEnvRunner
from headrace.workers.runner.single_agent_env_runner import SingleAgentEnvRunner
from headrace.workers.serving.served_env import ServedAgentsEnv, ServedEnv, served_config

_CUT_S = 0.2
"""How long steps are gathered before they are let go: within it SIGTERM is noticed."""


@dataclass(slots=True)
class AgentSums:
    """One agent's, of the episodes in which it has appeared."""

    episodes: int = 0
    total_return: float = 0.0

    def add(self, episode_return: float) -> None:
        """An episode has ended that was worth so much to it."""
        self.episodes += 1
        self.total_return += episode_return

    @property
    def mean(self) -> float:
        """Over its episodes."""
        return self.total_return / self.episodes


@dataclass(slots=True)
class EpisodeSums:
    """Episodes since the start, whether their clients wanted them trained on or not; a callback of the runner."""

    episodes: int = 0
    steps: int = 0
    """Of episodes that have ended."""
    aborted: int = 0
    """Episodes that were begun and never ended."""
    total_return: float = 0.0
    least_return: float = 0.0
    greatest_return: float = 0.0
    by_agent: dict[str, AgentSums] = field(default_factory=dict)
    """Of several agents, by the text of their ids; all else is of whole episodes: env steps, all agents' rewards."""

    def on_episode_end(self, episode: Any) -> None:
        """See `callbacks.py`."""
        for agent, own in getattr(episode, "agents", {}).items():
            self.by_agent.setdefault(str(agent), AgentSums()).add(own.episode_return)
        earned = episode.episode_return
        self.least_return = min(self.least_return, earned) if self.episodes else earned
        self.greatest_return = max(self.greatest_return, earned) if self.episodes else earned
        self.episodes += 1
        self.steps += len(episode)
        self.total_return += earned

    def on_episode_aborted(self) -> None:
        """See `callbacks.py`."""
        self.aborted += 1

    def as_json(self) -> dict[str, Any]:
        """Plain values; means and extremes are None while no episode has ended."""
        ended = self.episodes or None
        agents = {"mean_return_by_agent": {agent: own.mean for agent, own in self.by_agent.items()}}
        return {
            "episodes": self.episodes,
            "steps": self.steps,
            "aborted": self.aborted,
            "mean_return": self.total_return / ended if ended else None,
            "min_return": self.least_return if ended else None,
            "max_return": self.greatest_return if ended else None,
            "mean_length": self.steps / ended if ended else None,
            **(agents if self.by_agent else {}),
        }


class StandaloneServer:
    """Clients come in as soon as it is built, and are answered while `serve` runs. Needs no broker and no learner.

    `config` says as in a fleet which env has the spaces, which modules and connectors act, and where to listen. Raises
    what a worker would: `ConfigError`, `KeysError`, `PortInUseError`, `EnvError`, and `ModuleError` or `ConnectorError`
    for `arrays`, the weights and connector state of one version as they are published, that do not fit. A module that
    has none there acts as it was built. Clients do not act by themselves here.
    """

    def __init__(self, config: FleetConfig, arrays: Arrays, version: Version) -> None:
        self.sums = EpisodeSums()
        self._drain_timeout_s = config.worker.drain_timeout_s
        kind = MultiAgentEnvRunner if config.sampling.is_multi_agent else SingleAgentEnvRunner
        self._runner: SingleAgentEnvRunner | MultiAgentEnvRunner = kind(_settings(config, self.sums))
        try:
            self._runner.set_weights(arrays, version[1], version[0])
            state = self._runner.get_state(components=list(PIPELINES))
        except BaseException:
            self._runner.stop()
            raise
        self._connectors = {name: state[name] for name in PIPELINES if state.get(name)}

    @property
    def env(self) -> ServedEnv | ServedAgentsEnv:
        """What clients come to: `endpoint` for ZeroMQ, `url` for HTTP."""
        env = self._runner.env
        assert isinstance(env, ServedEnv | ServedAgentsEnv), "the config's serving is enabled"
        return env

    def serve(self, stopping: threading.Event) -> None:
        """Answer until `stopping` is set; then what is open may end, for `worker.drain_timeout_s`, and nothing begins.

        Raises what ends a worker: `EnvRestartBudgetError`, `ModuleError`, `ConnectorError`, `CallbackError`.
        """
        while not stopping.is_set():
            self._sample()
        deadline = time.monotonic() + self._drain_timeout_s
        self.env.episodes.admit_no_more("the server is stopping")
        while self.env.episodes.counts()["open"] and time.monotonic() < deadline:
            self._sample()
        self._runner.discard_open(Discard.SHUTDOWN)

    def _sample(self) -> None:
        self._runner.sample_fragment()
        if self._connectors:  # they go on learning from what they see, and this policy is to stay as it is
            self._runner.set_state(self._connectors)

    def close(self) -> None:
        """Serve nobody any more; clients that still wait are told so."""
        self._runner.stop()


def _settings(config: FleetConfig, sums: EpisodeSums) -> EnvRunnerConfig:
    """Those of a worker, but for what says how envs are stepped, of which there are none, or how long data is kept."""
    sampling = config.sampling.model_copy(
        update={
            "env_placement": "inline",
            "double_buffering": False,
            "gym_env_vectorize_mode": None,
            "batch_mode": "truncate_episodes",
            "external_fragment_max_age_s": _CUT_S,
        }
    )
    serving = config.serving.model_copy(update={"enabled": True, "client_inference": False})
    settings = served_config(config.model_copy(update={"sampling": sampling, "serving": serving}))
    return settings.model_copy(update={"callbacks": [*settings.callbacks, sums]})
