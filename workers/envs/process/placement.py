"""Opens the backend of envs in other processes of this machine."""

from __future__ import annotations

from headrace.schemas.accounts.user_calls import UserCall
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.process.child import SOLO_CHILD
from headrace.workers.envs.process.pool import EnvProcessPool


class ProcessPlacement:
    """Envs in processes of `envs_per_process` envs each, which run the module `child`."""

    def __init__(self, child: str = SOLO_CHILD) -> None:
        self._child = child

    def check(self, config: EnvRunnerConfig) -> None:
        """Do nothing: opening the pool finds out."""

    def open(self, table: LaneTable) -> EnvProcessPool:
        """Start all processes and build all envs. Raises what `EnvProcessPool` does."""
        with table.totals.calls.of(UserCall.PROCESSES, 0):
            pool = EnvProcessPool(table.config, table.worker_index, table.making_seed, child=self._child)
        table.totals.calls.elsewhere = pool.longest_call
        return pool
