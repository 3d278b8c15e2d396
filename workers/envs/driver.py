"""The interface through which a sampler uses its envs, in every placement and pace.

    while sampling:   send_actions(columns) ── poll() ── try_reset(lanes that ended) ── try_restart() if some failed

Those of one agent are `EnvVector` (`vector.py`) and native vectors (`native/`), those of several agents `InlineAgents`
and `PackedAgents` (`workers/agents/`). An env of another kind brings its own driver: see `own_driver`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pkgutil import resolve_name
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.backend import EnvHostsHere
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.sequential_step import Outcome

StartEpisodes = Callable[[Callable[[], None]], None]
"""Called with the function that rebuilds envs, which may begin episodes."""


class LaneDriver(Protocol):
    """Lanes of envs, with all operations of a sampler on them except steps. A lane is live while it has an episode.

    The drivers of Headrace's own envs derive from it.

    Only `build`, `try_restart` and `wait_for_one` raise. Any other failure waits for `try_restart`. If an agent of
    several gets no seat, `try_reset` and `take_started` raise too.
    """

    lanes: list[Lane]
    pace: Pace
    halves: list[NDArray[np.intp]]
    """Groups of lanes that act together once all live lanes of the group can. Empty: each lane acts when it can."""
    replies_at_once: bool = True
    """True if `poll` steps envs in this process, and does not wait for others."""
    on_rebuild: Callable[[], None] | None = None
    """Called before an env is rebuilt, which may take any time."""
    on_episode_created: Callable[[Lane, Episode], None] | None = None
    """Called before a reset. A `CallbackError` is a failure of the lane."""
    on_failure: Callable[[Lane, Failure], None] | None = None
    """Called for each failure before its lane is taken down."""
    on_wait: Callable[[], None] | None = None
    """Called now and then while a poll waits for envs that are out of reach."""
    _table: LaneTable
    _recovery: Any
    """A `LaneRecovery`; or a `SharedRecovery`, whose driver overrides the methods that call this one."""

    @property
    def live(self) -> NDArray[np.intp] | None:
        """Lanes with an episode, None when all have one."""
        live: NDArray[np.intp] | None = None if self._recovery.are_all_up else self._recovery.live
        return live

    @property
    def under_way(self) -> set[int]:
        """Live lanes whose action has no reply yet. In lock-step there are none between two polls."""
        return set()

    @property
    def repairing(self) -> bool:
        """Return whether `wait_for_one` has work before the next poll."""
        return not self._recovery.are_all_up

    @property
    def has_processes(self) -> bool:
        """Return whether envs are in other processes, or on other hosts."""
        return False

    @property
    def env_hosts(self) -> EnvHostsHere | None:
        """Return how many env hosts are connected, and how many all lanes need; None for envs elsewhere."""
        return None

    @property
    def seeds_every_episode(self) -> bool:
        """Return whether each episode begins with its own seed, so that it can be repeated."""
        return True

    def why_no_tasks(self, group: int) -> str:
        """Return why the envs take no tasks, or none in groups of `group`, and what helps; "" if they take them."""
        return ""

    @property
    def steps_to_reset(self) -> bool:
        """Return whether a lane may need a poll without a step to begin its next episode, while other lanes step."""
        return False

    def build(self, config: EnvRunnerConfig) -> None:
        """Build all envs, after closing earlier ones. Raises if an env cannot be built."""

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`: now, or with a later poll if the envs reset themselves."""

    def take_started(self) -> list[int]:
        """Return the lanes that began an episode since the last call."""
        return self._table.take_started()

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`: they are over, or abandoned."""
        self._recovery.end_episodes(lanes)

    def fail(self, failure: Failure) -> None:
        """Take the lane out. `try_restart` handles the failure."""
        self._table.failed.append(failure)

    def try_restart(self) -> None:
        """Close and rebuild the failed envs, now or after their wait.

        Raises `EnvRestartBudgetError` when an env has failed too often, and the env's own error when the config says
        that failed envs are not rebuilt.
        """
        self._recovery.try_restart(self.on_failure)

    def wait_for_one(self, start_episodes: StartEpisodes, on_wait: Callable[[], None] | None) -> None:
        """Rebuild the failed envs whose wait is over. While no env is up, sleep until the first is up.

        Calls `start_episodes` with the function that rebuilds, and `on_wait` after every short sleep.
        """
        start_episodes(self._revive)
        while not self._is_up:
            self._pause()
            if on_wait is not None:
                on_wait()
            start_episodes(self._revive)

    @property
    def _is_up(self) -> bool:
        """Return whether a lane can be stepped."""
        return bool(self._recovery.up)

    def _revive(self) -> None:
        """Rebuild the failed envs whose wait is over, and begin episodes there."""
        self._recovery.revive(self.on_failure)

    def _pause(self) -> None:
        """Sleep a moment, because no lane is up."""
        self._table.sleep_until_due()

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        """Return one env's picture, rgb uint8 (height, width, 3); None where it gives none."""

    def stop(self) -> None:
        """Close all envs, within one time limit for all of them."""


class EnvDriver(LaneDriver, Protocol):
    """Lanes of envs of one agent.

    `observations.columns` have every lane's newest observation; `poll` and `try_reset` overwrite them. They keep a
    lane's observation while its action is under way.
    """

    spaces: Spaces
    gym_spaces: tuple[Any, Any]
    observations: Observations

    def send_actions(self, columns: dict[str, NDArray[Any]], lanes: NDArray[np.intp] | None = None) -> None:
        """Send `lanes` their actions: their rows of the policy's columns. Does not wait for steps.

        In lock-step `lanes` is None, which means all live lanes. Otherwise they are live and not under way.
        """

    def poll(self) -> Outcome:
        """Return the results of the actions sent. May block as long as an env takes to step.

        Where each env has its own pace, it waits until a lane can act, then `remote_env_batch_wait_ms` for more lanes.
        It returns earlier if the caller has other work, such as a rebuild. `Outcome.lanes` says which lanes are ready.
        """


class ExternalDriver(LaneDriver, Protocol):
    """Lanes of `Pace.EXTERNAL`: their episodes drive themselves, and are never stepped or reset."""

    read_version: Callable[[], tuple[int, int]]
    """Returns (learner_epoch, seq) of the weights that act."""
    heard_at: float
    """Time of the last message from a driver of an episode, in monotonic seconds."""

    @property
    def open_episodes(self) -> int:
        """The number of episodes that have begun and not ended."""

    @property
    def asking(self) -> NDArray[np.intp]:
        """The lanes that wait for an action."""

    def logged(self, acting: Any) -> Mapping[int, Mapping[str, NDArray[Any]]]:
        """Return the actions that callers chose themselves, by lane or seat. `acting`: lanes, or seats of a module."""


def external(envs: LaneDriver) -> ExternalDriver | None:
    """Return `envs` where their episodes drive themselves; None where they are stepped."""
    return cast(ExternalDriver, envs) if envs.pace is Pace.EXTERNAL else None


def own_driver(env: Any, *, several_agents: bool = False) -> Any:
    """Return the class that drives envs of this kind; None for gymnasium's and for vectors.

    The class of `env` names it: in `headrace_driver` for one agent, in `headrace_agents_driver` for several, as
    "package.module:Class". It is called with the `LaneTable`, the `Seating` of several agents, and `env`.
    """
    name = getattr(type(env), "headrace_agents_driver" if several_agents else "headrace_driver", None)
    return resolve_name(name) if name else None


class Pace(Enum):
    """The times at which the envs of a vector step."""

    LOCK_STEP = "lock_step"
    """Each poll steps every env that is up, and waits for all of them."""
    READY = "ready"
    """Each poll sends actions to the envs that are ready, and takes the answers that have come."""
    EXTERNAL = "external"
    """Episodes drive themselves: each poll takes their calls and answers them."""


Rows = NDArray[np.intp]


def idle_lanes(envs: LaneDriver, width: int) -> Rows:
    """Return the lanes with an episode whose last action was answered, in order."""
    return np.flatnonzero(_live_and_idle(envs, width)[1])


def next_to_act(envs: LaneDriver, width: int) -> Rows:
    """Return the lanes that can act, in order. With halves, return the whole half that waited longest, or no lane."""
    (live, idle), halves = _live_and_idle(envs, width), envs.halves
    if not halves:
        return np.flatnonzero(idle)
    for place, half in enumerate(halves):
        up = half[live[half]]
        if len(up) and idle[up].all():
            halves.append(halves.pop(place))
            return up
    return np.empty(0, np.intp)


def _live_and_idle(envs: LaneDriver, width: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    live = np.zeros(width, np.bool_)
    live[slice(None) if envs.live is None else envs.live] = True
    idle = live.copy()
    idle[list(envs.under_way)] = False
    return live, idle
