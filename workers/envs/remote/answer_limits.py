"""How long a host that lives may take for the answer to an order.

A host has deadlines of its own, kills an env that hangs, and answers with that failure. So these limits, from the
worker's settings, end only the wait for a host that does not: its own deadlines are longer, or it is broken.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.process.control import Command, Phase
from headrace.workers.envs.process.job_settings import limits_of


def answer_limits(config: EnvRunnerConfig) -> Mapping[Command, float]:
    """Return the limit of each command, in seconds.

    Envs that share a process take turns, so an order may wait for those of its neighbours. A step may include the reset
    after it.
    """
    phases = limits_of(config)
    turn_s = phases[Phase.STEP] + phases[Phase.RESET]
    waiting_s = config.envs_per_process * turn_s + config.env_hosts_lease_s
    building_s = waiting_s + phases[Phase.START] + config.envs_per_process * phases[Phase.CONSTRUCTION]
    return {
        Command.STEP: waiting_s,
        Command.RESET: waiting_s,
        Command.BUILD: building_s,
        Command.REBUILD: building_s,
    }
