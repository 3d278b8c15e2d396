"""The core's limits from the configuration, and the state that it must keep over a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.schemas.runner_counters import Counters

Overflow = Literal["block", "drop_oldest", "drop_stale"]


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """Limits from the configuration. Sizes in bytes, times in seconds; `BrokerSection` explains each."""

    max_batch_bytes: int = 128 << 20
    max_held_bytes: int = 1 << 30
    overflow: Overflow = "block"
    max_staleness: int = 8
    lease_s: float = 10.0
    heartbeat_interval_s: float = 1.0
    weights_endpoint: str = ""
    max_env_steps: int | None = None
    """Env steps of the fleet's whole life after which workers begin no fragment; None: no bound."""
    synchronous: bool = False
    workers: int = 0
    """Workers that the config starts, for which the first round of synchronous sampling waits."""


@dataclass(slots=True)
class BrokerState:
    """State that must survive a restart for the broker's answers to stay true. It is written before they are sent."""

    epoch: int = 0
    learner_token: str = ""
    incarnations: dict[int, int] = field(default_factory=dict)
    """Highest incarnation ever given out, by slot."""
    counters: dict[int, Counters] = field(default_factory=dict, compare=False)
    """Lifetime counters of the runner in each slot. Redis alone keeps them: no promise depends on the newest."""
