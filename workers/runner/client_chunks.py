"""Chunks that clients sampled and cut, added to the counts of the runner whose worker ships them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.workers.metrics.runner_metrics import RunnerMetrics
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.sampling.module_batches import ModuleBatches

Episodes = Sequence[tuple[float, int]]
"""(return, length) of each episode."""


@dataclass(frozen=True, slots=True)
class ClientChunks:
    """A batch (or None) from clients, and further counts."""

    batch: ChunkBatch | None = None
    discarded: Mapping[Discard, int] = field(default_factory=dict)
    """Steps that will be in no batch."""
    untrained: Episodes = ()
    """Episodes that have ended and are not trained on."""
    episodes: Episodes = ()
    """Ended episodes of several agents. With one agent the batch has them."""
    env_steps: tuple[int, int, int] = (0, 0, 0)
    """With several agents: env steps taken, delivered, discarded. With one agent, each step is an env step."""
    outside: int = 0
    """Observations with values outside their Box."""


def take_over(taken: ClientChunks, totals: RunnerTotals, metrics: RunnerMetrics, *, several_agents: bool) -> None:
    """Add `taken` to `totals` and `metrics`."""
    totals.observations_outside += taken.outside
    for reason, steps in taken.discarded.items():
        totals.stepped += steps
        totals.discard(reason, steps, 0 if several_agents else steps)
    if taken.batch is not None:
        totals.stepped += taken.batch.steps
        totals.delivered += taken.batch.steps
        totals.delivered_chunks += len(taken.batch)
    for episode_return, length in taken.untrained:
        metrics.add_untrained(episode_return, length)
    if several_agents:
        _count_agents(taken, totals, metrics)
        return
    if taken.batch is not None:
        totals.episodes += metrics.add_table(taken.batch.table, taken.batch)
    totals.env_steps, totals.env_steps_delivered = totals.stepped, totals.delivered


def _count_agents(taken: ClientChunks, totals: RunnerTotals, metrics: RunnerMetrics) -> None:
    stepped, delivered, discarded = taken.env_steps
    totals.env_steps += stepped
    totals.env_steps_delivered += delivered
    totals.env_steps_discarded += discarded
    totals.episodes += len(taken.episodes)
    metrics.add_episodes(taken.episodes)
    if taken.batch is not None:
        module_id = taken.batch.modules[0]
        steps = ModuleBatches({module_id: taken.batch}).agent_steps()
        metrics.count_steps(steps, {module_id: taken.batch.steps}, steps)
        metrics.add_agents(taken.batch)
