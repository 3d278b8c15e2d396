"""The names in a runner's report, as RLlib's users know them, and the counters that span all lives of a slot.

Add the name of a new figure to `RESERVED`, so that no callback logs under it, and that of a new lifetime counter to its
group. Counters of `RunnerTotals` bear their names there.
"""

from __future__ import annotations

from headrace.workers.metrics.timers import TIMERS
from headrace.workers.metrics.totals import REPORTED

SINGLE_COUNTERS = ("num_env_steps_sampled_lifetime", "num_episodes_lifetime")
"""Lifetime counters of delivered steps and episodes."""
LOSS_COUNTERS = (
    *REPORTED,
    "num_agent_steps_discarded_lifetime",
    "num_agent_rewards_lost_lifetime",
    "num_final_observations_repeated_lifetime",
    "num_final_steps_dropped_lifetime",
    "num_untrained_episodes_lifetime",
)
"""Lifetime counters of failures, and of steps and episodes lost by them or withheld by clients.

Each life of a runner counts these from 0.
"""
NAMED_COUNTERS = (
    "num_agent_steps_sampled_lifetime",
    "num_module_steps_sampled_lifetime",
    "num_actions_by_agent_lifetime",
)
"""Lifetime counters by agent or module."""

RESERVED = frozenset(
    (
        "num_env_steps_sampled",
        "num_env_steps_sampled_lifetime_throughput",
        "num_episodes",
        "num_agent_steps_sampled",
        "num_actions_by_agent",
        "num_module_steps_sampled",
        "agent_rewards_lost_lifetime",
        "episode_return_mean",
        "episode_return_min",
        "episode_return_max",
        "episode_len_mean",
        "episode_len_min",
        "episode_len_max",
        "episode_duration_sec_mean",
        "untrained_episode_return_mean",
        "untrained_episode_len_mean",
        "agent_episode_returns_mean",
        "agent_steps",
        "module_episode_returns_mean",
        "windows",
        "weights_seq_no",
        "time_s_lifetime",
        *TIMERS,
        *SINGLE_COUNTERS,
        *LOSS_COUNTERS,
        *NAMED_COUNTERS,
    )
)
"""Names of a report that a callback cannot log under. Rates are per second, durations in seconds.

num_agent_steps_sampled and num_module_steps_sampled count the observations that steps gave to agents, as in RLlib.
num_actions_by_agent counts the actions that agents took, which is what chunks hold. The two differ where an agent
appears later than the reset (one observation more) or ends without a last observation (one less).
"""
