"""The core's limits from the configuration, and the state that it must keep over a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace.schemas.accounts.runner_counters import Counters
from headrace.schemas.peers.heartbeat_interval import heartbeat_interval

Overflow = Literal["block", "drop_oldest", "drop_stale"]

RECONCILE_WAIT_S = 30.0
"""Seconds that a new broker waits to hear which batches the learner has. Until then it counts none as lost and drops
none, and closes no books of dead workers.
"""


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """Limits from the configuration. Sizes in bytes, times in seconds; `BrokerSection` explains each."""

    max_batch_bytes: int = 128 << 20
    max_held_bytes: int = 1 << 30
    max_held_batches: int | None = None
    overflow: Overflow = "block"
    max_staleness: int | None = None
    lease_s: float = 10.0
    heartbeat_interval_s: float = 1.0
    weights_endpoint: str = ""
    max_env_steps: int | None = None
    """Env steps of the fleet's whole life after which workers begin no fragment; None: no bound."""
    synchronous: bool = False
    workers: int = 0
    """Workers that the config starts, for which the first round of synchronous sampling waits."""
    brokers: int = 1
    index: int = 0
    """Number of this broker in its fleet: it has the slots that are `index` modulo `brokers`."""
    consumer_groups: Mapping[str, Literal["wait", "drop"]] = field(default_factory=dict)
    """The consumer groups that the config names, each with what happens while it is slow or away."""

    def heartbeat_interval(self, workers: int) -> float:
        """Return the seconds between two heartbeats of one of `workers`."""
        return heartbeat_interval(self.heartbeat_interval_s, self.lease_s, workers)


@dataclass(slots=True)
class GroupState:
    """The lease of a consumer group, as far as it must survive a restart of the broker."""

    epoch: int = 0
    learner_token: str = ""
    """Digest of the token of the reader of `epoch`; the token itself is on no disk and not in Redis."""


@dataclass(slots=True)
class BrokerState(GroupState):
    """State that must survive a restart for the broker's answers to stay true. It is written before they are sent.

    The lease is the learner's.
    """

    incarnations: dict[int, int] = field(default_factory=dict)
    """Highest incarnation ever given out, by slot."""
    groups: dict[str, GroupState] = field(default_factory=dict)
    """The consumer groups besides the learner's, by name."""
    counters: dict[int, Counters] = field(default_factory=dict, compare=False)
    """Lifetime counters of the runner in each slot. Redis and `lifetime_file.py` keep them: no promise depends on the
    newest.
    """
