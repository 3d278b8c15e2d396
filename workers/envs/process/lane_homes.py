"""The process of each lane's env, and the lane's move to a new process when the old one is replaced."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.schemas.settings.sampling_settings import ENV_CLOSE_TIMEOUT_S
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.process.control import NO_SEED, Command
from headrace.workers.envs.process.handle import ProcessHandle
from headrace.workers.envs.process.processes import Processes

_MB = 1_000_000
_PATIENCE = 1.25
"""A process that is being replaced is killed when its memory reaches this many times its cap."""


SeedFor = Callable[[int, bool], int]
"""(lane, whether its env replaces one that failed) -> the seed for the env's creator."""


class LaneHomes:
    """Lanes [0, k) share a process, [k, 2k) another, and so on. An env is built in the newest process of its lane."""

    def __init__(self, config: EnvRunnerConfig, processes: Processes, seed_for: SeedFor | None) -> None:
        self._config = config
        self._seed_for = seed_for
        self._processes = processes
        self._homes: list[ProcessHandle | None] = [None] * config.num_envs
        self._newest: dict[int, ProcessHandle] = {}
        """The newest process of each group of lanes, by its first lane."""

    def home(self, lane: int) -> ProcessHandle:
        """Return the process of a lane that has an env."""
        home = self._homes[lane]
        assert home is not None, "a lane that has failed is restarted before it is reset or stepped"
        return home

    def may_stay(self, lane: int) -> bool:
        """Return whether the lane's next episode can be in the same process."""
        return self._homes[lane] is self._newest.get(lane - lane % self._config.envs_per_process)

    def is_whole(self, handle: ProcessHandle) -> bool:
        """Return whether all lanes of the process have their env there, and need not move."""
        return len(handle.members) == handle.lanes and self._is_newest(handle)

    def build(self, lane: int, command: Command) -> None:
        """Build an env for the lane in its newest process. Close the lane's env in an older process."""
        first = lane - lane % self._config.envs_per_process
        if first not in self._newest:
            self._start(first)
        newest = self._newest[first]
        if self._homes[lane] is not newest:
            self.leave(lane)
            self._homes[lane] = newest
            newest.members.add(lane)
        recreated = command is Command.REBUILD
        newest.ask(lane, command, NO_SEED if self._seed_for is None else self._seed_for(lane, recreated))

    def leave(self, lane: int) -> None:
        """Close the lane's env in its process. Stop the process if no lane needs it any more."""
        home, self._homes[lane] = self._homes[lane], None
        if home is None:
            return
        home.members.discard(lane)
        if not home.members and not self._is_newest(home):
            home.stop(time.monotonic() + ENV_CLOSE_TIMEOUT_S)
        else:
            home.ask(lane, Command.CLOSE)

    def lose(self, handle: ProcessHandle) -> None:
        """Note that the process has ended, and with it the envs of all its lanes."""
        if self._is_newest(handle):
            del self._newest[handle.first_lane]
        for lane in handle.members:
            self._homes[lane] = None

    def weigh(self, handle: ProcessHandle) -> None:
        """Replace a process that has had enough episodes or uses too much memory. Kill one that uses far too much."""
        config = self._config
        most_episodes, most_mb = config.env_process_max_episodes, config.env_process_max_rss_mb
        if most_episodes is None and most_mb is None:
            return
        size = handle.control.rss_bytes / _MB
        if most_mb is not None and size > _PATIENCE * most_mb:
            handle.kill(f"SIGKILL, since its {size:.0f} MB are far above env_process_max_rss_mb = {most_mb},")
            return
        used_up = most_episodes is not None and handle.episodes >= most_episodes
        too_large = most_mb is not None and size > most_mb
        if (used_up or too_large) and self._is_newest(handle):
            self._start(handle.first_lane)

    def _is_newest(self, handle: ProcessHandle) -> bool:
        return self._newest.get(handle.first_lane) is handle

    def _start(self, first: int) -> None:
        lanes = min(self._config.envs_per_process, len(self._homes) - first)
        self._newest[first] = self._processes.start(first, lanes)
