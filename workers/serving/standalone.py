"""A policy server without a fleet: a worker's policy server with fixed weights.

It sums up the clients' episodes. The chunks go nowhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.basics.bounds import Version
from headrace.schemas.messages.weights import Arrays
from headrace.schemas.settings.config import DRAIN_TIMEOUT_S, FleetConfig
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.runner.single_agent_env_runner import open_runner
from headrace.workers.serving.served_env import ServedEnv, ServedMultiAgentEnv, served_config

_CUT_S = 0.2
"""The length of one round of sampling, and so how soon SIGTERM is noticed."""


@dataclass(slots=True)
class EpisodeSums:
    """Sums over all episodes since the start, trained on or not. It is a callback of the runner."""

    episodes: int = 0
    steps: int = 0
    """Env steps of episodes that have ended."""
    aborted: int = 0
    """Episodes that were started and never ended."""
    total_return: float = 0.0
    least_return: float = 0.0
    greatest_return: float = 0.0
    by_agent: dict[str, tuple[int, float]] = field(default_factory=dict)
    """With several agents: each one's episodes and return, by the text of its id. Other sums are over all agents."""

    def on_episode_end(self, episode: Any) -> None:
        """Add an episode that has ended."""
        for agent, own in getattr(episode, "agents", {}).items():
            episodes, total = self.by_agent.get(str(agent), (0, 0.0))
            self.by_agent[str(agent)] = episodes + 1, total + own.episode_return
        earned = episode.episode_return
        self.least_return = min(self.least_return, earned) if self.episodes else earned
        self.greatest_return = max(self.greatest_return, earned) if self.episodes else earned
        self.episodes += 1
        self.steps += len(episode)
        self.total_return += earned

    def on_episode_aborted(self) -> None:
        """Count an aborted episode."""
        self.aborted += 1

    def as_json(self) -> dict[str, Any]:
        """Return plain values. Means and extremes are None while no episode has ended."""
        ended = self.episodes or None
        agents = {"mean_return_by_agent": {agent: total / count for agent, (count, total) in self.by_agent.items()}}
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
    """A policy server that needs no broker and no learner. Clients may connect once it is built; `serve` answers them.

    `config` says, as in a fleet, which env has the spaces, which modules and connectors act, and where to listen.
    `arrays` are the weights and the connector state of one version, as they are published. A module without weights in
    `arrays` acts as it was built. Clients cannot act by themselves here.

    Raises `ConfigError`, `KeysError`, `PortInUseError` and `EnvError` as a worker does, and `ModuleError` or
    `ConnectorError` for `arrays` that do not fit.
    """

    def __init__(self, config: FleetConfig, arrays: Arrays, version: Version) -> None:
        self.sums = EpisodeSums()
        self._runner = open_runner(_settings(config, self.sums))
        try:
            self._runner.set_weights(arrays, version[1], version[0])
            self._runner.freeze_connectors()  # this policy is to stay as it is
        except BaseException:
            self._runner.stop()
            raise

    @property
    def env(self) -> ServedEnv | ServedMultiAgentEnv:
        """The env with the addresses for clients: `endpoint` for ZeroMQ, `url` for HTTP."""
        env = self._runner.env
        assert isinstance(env, ServedEnv | ServedMultiAgentEnv), "the config's serving is enabled"
        return env

    def serve(self, stopping: threading.Event, on_turn: Callable[[], None] = lambda: None) -> None:
        """Serve until `stopping` is set. Then refuse new episodes, and let open ones end, for 10 s at most.

        `on_turn` is called between two fragments, as a sign of life.
        Raises the errors that end a worker: `EnvRestartBudgetError`, `ModuleError`, `ConnectorError`, `CallbackError`.
        """
        while not stopping.is_set():
            on_turn()
            self._runner.sample_fragment()
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        self.env.episodes.admit_no_more("the server is stopping")
        while self.env.episodes.counts()["open"] and time.monotonic() < deadline:
            on_turn()
            self._runner.sample_fragment()
        self._runner.discard_open(Discard.SHUTDOWN)

    def close(self) -> None:
        """Stop serving. Waiting clients get an error."""
        self._runner.stop()


def _settings(config: FleetConfig, sums: EpisodeSums) -> EnvRunnerConfig:
    """Return a worker's settings, with fixed values for those about stepping envs and keeping data."""
    fixed = {
        "sampling.env_placement": "inline",
        "sampling.double_buffering": False,
        "sampling.gym_env_vectorize_mode": None,
        "sampling.batch_mode": "truncate_episodes",
        "sampling.external_fragment_max_age_s": _CUT_S,
        "serving.enabled": True,
        "serving.client_inference": False,
    }
    settings = served_config(config.replaced(fixed))
    return settings.model_copy(update={"callbacks": [*settings.callbacks, sums]})
