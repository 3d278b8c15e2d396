"""Where a config wants its multi-agent envs."""

from __future__ import annotations

from collections.abc import Callable

from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.multi_agent.elsewhere import ProcessAgents, RemoteAgents
from headrace.workers.multi_agent.lanes import MultiAgentLanes
from headrace.workers.multi_agent.policies import Policies
from headrace.workers.multi_agent.ready import ReadyProcessAgents, ReadyRemoteAgents
from headrace.workers.multi_agent.vector import MultiAgentVector
from headrace.workers.randomness import SeedTree
from headrace.workers.totals import RunnerTotals


def open_agents(
    config: EnvRunnerConfig,
    worker_index: int,
    seeds: SeedTree,
    totals: RunnerTotals,
    policies: Policies,
    id_high: int,
    callbacks: CallbackList,
    on_wait: Callable[[], None] | None = None,
) -> MultiAgentLanes:
    """The envs that `config` asks for, built; for `on_wait` and errors see `envs.opening.open_envs`."""
    parts = config, worker_index, seeds, totals, policies, id_high, callbacks
    if config.env_placement == "remote":
        return (ReadyRemoteAgents if config.steps_the_ready else RemoteAgents)(*parts, on_wait=on_wait)
    if config.steps_the_ready:
        return ReadyProcessAgents(*parts)
    return (ProcessAgents if config.env_placement == "process" else MultiAgentVector)(*parts)
