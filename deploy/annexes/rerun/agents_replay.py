"""The repetition of a failed episode of several agents: each agent's actions at the env steps at which it acted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from headrace.deploy.annexes.rerun.repeated import Repeated
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.workers.agents.episodes import Seat
from headrace.workers.agents.inline import InlineAgents
from headrace.workers.agents.packed import PackedAgents
from headrace.workers.agents.seating import Seating
from headrace.workers.agents.vector import AgentSource, MultiAgentVector
from headrace.workers.envs.actions import to_env_form
from headrace.workers.envs.driver import Pace
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.vector import OpenBackend
from headrace.workers.policy.policies import Policies
from headrace.workers.randomness.seeds import SeedTree
from headrace.workers.reruns.episode_trail import digests
from headrace.workers.reruns.failure_files import KeptFailure


@contextmanager
def open_agents(table: LaneTable, open_process: OpenBackend) -> Iterator[MultiAgentVector]:
    """Build the env of the table's config, here or in a process. Yield its vector."""
    config = table.config
    seating = Seating(Policies.of(config), 1, SeedTree(0, 0, 0, 1), 0)
    source: AgentSource
    if config.env_placement == "process":
        source = PackedAgents(table, open_process, Pace.LOCK_STEP, seating)
    else:
        source = InlineAgents(table, seating)
    try:
        yield MultiAgentVector(source, seating, table)
    finally:
        source.stop()


@dataclass(slots=True)
class _Agent:
    """An agent's steps in the worker, and how many of them were repeated."""

    actions: list[Any]
    env_t: list[int]
    rewards: NDArray[Any]
    seen: dict[str, NDArray[Any]]
    acted: int = 0
    answered: int = 0


def play_agents(
    vector: MultiAgentVector, failure: KeptFailure, repeated: Repeated, watch: Callable[[AgentSource, int], None]
) -> None:
    """Take the steps of the failure, until the env fails or ends the episode, or other agents act than did."""
    vector.envs.take_started()
    agents, steps = dict[Any, _Agent](), failure.facts.steps
    for step in range(steps):
        acting, actions = vector.acting(), []
        for seat in acting.seats:
            if seat.agent not in agents:
                agents[seat.agent] = _agent(vector.seating, seat, failure)
            own = agents[seat.agent]
            _compare(seat, own, repeated)
            if own.acted == len(own.actions) or own.env_t[own.acted] != step:
                repeated.note(f"agent {seat.agent!r} is to act, which did not act then")
                return
            actions.append(own.actions[own.acted])
            own.acted += 1
        repeated.at = f"step {step + 1}"
        outcome = vector.step(acting, actions)
        if outcome.failures:
            repeated.error = outcome.failures[0].error
            return
        watch(vector.envs, 0)
        if step == steps - 1:
            repeated.end = outcome.over.get(0, ChunkEnd.ONGOING)
            return
        for seat, reward in zip(outcome.answered, outcome.rewards, strict=True):
            own = agents[seat.agent]
            if reward.tobytes() != own.rewards[own.answered].tobytes():
                repeated.note(
                    f"reward {reward} of agent {seat.agent!r}, and the worker got {own.rewards[own.answered]}"
                )
            own.answered += 1
        if outcome.over:
            repeated.note(f"the episode ended, {outcome.over[0].name.lower()}")
            return


def _agent(seating: Seating, seat: Seat, failure: KeptFailure) -> _Agent:
    prefix = f"{seating.agents[seat.agent]}/"
    found = {name.removeprefix(prefix): rows for name, rows in failure.arrays.items() if name.startswith(prefix)}
    if not found:
        return _Agent([], [], failure.arrays.get("rewards", ()), {})  # type: ignore[arg-type]
    seen = {name: rows for name, rows in found.items() if name.partition("/")[0] == "obs"}
    actions = to_env_form(seat.module.env_spaces.action, found, "actions")
    return _Agent(actions, found["env_t"].tolist(), found["rewards"], seen)


def _compare(seat: Seat, own: _Agent, repeated: Repeated) -> None:
    """Note the first leaf of the agent's observation that is not the one that the worker saw."""
    place = own.acted - len(own.actions)
    for name, column in own.seen.items():
        row = seat.module.observations.columns[name][seat.row : seat.row + 1]
        if -len(column) <= place < 0 and digests(row)[0] != column[place]:
            repeated.note(f"observation {name.partition('/')[2] or name} of agent {seat.agent!r}: {row[0]!s:.60}")
