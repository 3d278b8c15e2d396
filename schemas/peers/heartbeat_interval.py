"""The time between two heartbeats of a worker, which grows with the number of workers at its broker."""

from __future__ import annotations

HEARTBEATS_PER_S = 200
"""Heartbeats of all workers of a broker together, as far as the lease lets them be so rare. Each costs the broker a
quarter of a millisecond.
"""
_LEAST_IN_A_LEASE = 2.5
"""Heartbeats that a worker may say within its lease. So one may be lost, or late by more than an interval."""


LEAST_S = 1.0
"""Seconds between two heartbeats, unless the lease is short."""


def least_interval(lease_s: float) -> float:
    """Return the seconds between two heartbeats of a peer of a broker that has few workers."""
    return min(LEAST_S, lease_s / 10)


def heartbeat_interval(least_s: float, lease_s: float, workers: int) -> float:
    """Return the seconds between two heartbeats of one of `workers`: `least_s`, or more where there are many."""
    return max(least_s, min(workers / HEARTBEATS_PER_S, lease_s / _LEAST_IN_A_LEASE))
