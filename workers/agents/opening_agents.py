"""Creation of the envs of several agents that a config asks for, in every placement."""

from __future__ import annotations

from typing import Any

from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.agents.env import build_multi_agent_env, gym_spaces_of, spaces_by_agent
from headrace.workers.agents.inline import InlineAgents
from headrace.workers.agents.packed import PackedAgents
from headrace.workers.agents.seating import Seating
from headrace.workers.agents.vector import MultiAgentVector
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.driver import own_driver
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.policies import Policies
from headrace.workers.randomness.seeds import SeedTree
from headrace.workers.sampling.opening import OnWait, backend_of, check_batch_wait, first_env, pace_of


def open_agents(
    config: EnvRunnerConfig,
    worker_index: int,
    seeds: SeedTree,
    totals: RunnerTotals,
    policies: Policies,
    id_high: int,
    callbacks: CallbackList,
    on_wait: OnWait = None,
) -> MultiAgentVector:
    """Build the envs of several agents for `config`. See `open_envs` for `on_wait` and errors."""
    table = LaneTable(config, worker_index, seeds, totals, callbacks)
    seating = Seating(policies, config.num_envs, seeds, id_high)
    if config.env_placement != "inline":
        packed = PackedAgents(table, backend_of(config, on_wait), pace_of(config), seating)
        return MultiAgentVector(packed, seating, table)
    first = first_env(table)
    driver = own_driver(first, several_agents=True)
    check_batch_wait(config, has_own_driver=driver is not None)
    if driver is not None:
        return MultiAgentVector(driver(table, seating, first), seating, table)
    return MultiAgentVector(InlineAgents(table, seating, first), seating, table)


def adapted_agents(made: Any, context: EnvContext) -> tuple[Any, dict[Any, Spaces]]:
    """Return the env that a creator made, with the dict protocol unless it drives itself, and its spaces by agent."""
    env = made if own_driver(made, several_agents=True) is not None else build_multi_agent_env(lambda _: made, context)
    return env, spaces_by_agent(gym_spaces_of(env))
