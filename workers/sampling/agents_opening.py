"""Which kind of multi-agent envs a config asks for, and what samples them."""

from __future__ import annotations

from collections.abc import Callable

from headrace.workers.agents.elsewhere import ProcessAgents, RemoteAgents
from headrace.workers.agents.lanes import MultiAgentLanes
from headrace.workers.agents.ready import ReadyProcessAgents, ReadyRemoteAgents
from headrace.workers.agents.ready_seats import ReadySeats
from headrace.workers.agents.vector import MultiAgentVector
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.creators import find_creator, naming_what_failed
from headrace.workers.envs.opening import check_batch_wait
from headrace.workers.envs.pace import Pace
from headrace.workers.envs.roster import context_of
from headrace.workers.external.agents import ExternalAgents
from headrace.workers.external.agents_env import ExternalMultiAgentEnv
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.policies import Policies
from headrace.workers.randomness.seeds import SeedTree


def open_agents(
    config: EnvRunnerConfig,
    worker_index: int,
    seeds: SeedTree,
    totals: RunnerTotals,
    policies: Policies,
    id_high: int,
    callbacks: CallbackList,
    on_wait: Callable[[], None] | None = None,
) -> MultiAgentLanes | ExternalAgents:
    """The envs that `config` asks for, built; for `on_wait` and errors see `envs.opening.open_envs`."""
    parts = config, worker_index, seeds, totals, policies, id_high, callbacks
    if config.env_placement == "remote":
        return (ReadyRemoteAgents if config.steps_the_ready else RemoteAgents)(*parts, on_wait=on_wait)
    if config.steps_the_ready:
        return ReadyProcessAgents(*parts)
    if config.env_placement == "process":
        return ProcessAgents(*parts)
    creator, context = find_creator(config.env), context_of(config, worker_index, 0, seeds)
    with naming_what_failed(config, 0):
        first = creator(context)
    check_batch_wait(config, is_external=isinstance(first, ExternalMultiAgentEnv))
    kind = ExternalAgents if isinstance(first, ExternalMultiAgentEnv) else MultiAgentVector
    return kind(*parts, first=(first, context))


def pace_of(envs: MultiAgentLanes | ExternalAgents) -> Pace:
    """Return the pace at which `envs` go on."""
    if isinstance(envs, ExternalAgents):
        return Pace.EXTERNAL
    return Pace.READY if isinstance(envs, ReadySeats) else Pace.LOCK_STEP
