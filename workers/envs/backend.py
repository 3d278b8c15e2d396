"""The interface of the place where a vector's envs live: this process, other processes, or other hosts.

A vector never waits for one particular env. It asks lanes to step, to reset and to be rebuilt, and reads the replies in
`step_wait`, in any order:

    rebuild ── built ── reset ── began ── begin ── step_async ── stepped, ended ── reset ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.process_usage import Usage
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.gymnasium_spaces import to_gym
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import EnvError
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.observations import NoteOutside

NextSeeds = Mapping[int, int | None]
"""Lane -> the seed for the reset that follows its step, or None for a reset without one."""


class EnvHostsHere(NamedTuple):
    """The env hosts of some envs: number connected, number needed for all envs, and what the hosts report."""

    connected: int
    wanted: int
    versions: Sequence[str] = ()
    """Versions of Headrace, each once; "" stands for hosts that report none."""
    usage: Usage | None = None
    """The use of all hosts together. The time includes hosts that have gone. None before a host has told it."""


@dataclass(slots=True, eq=False)
class Replies:
    """The replies of a backend's envs since the last `step_wait`.

    A lane appears at most once in each list. Its observation and its reward are in the backend's columns.
    """

    stepped: list[int] = field(default_factory=list)
    ended: list[tuple[int, ChunkEnd]] = field(default_factory=list)
    """Lanes among `stepped` whose episode is over with that step."""
    also_truncated: list[int] = field(default_factory=list)
    """Lanes in `ended` as TERMINATED that are truncated too."""
    began: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """(lane, info) of each reset. `begin` shows the observation."""
    built: list[int] = field(default_factory=list)
    """Lanes whose env was rebuilt."""
    failures: list[Failure] = field(default_factory=list)
    """Lanes that have no env now. A lane that is also in `ended` failed in the reset after its last step."""
    infos: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Infos of steps that are not empty."""
    pictures: list[tuple[int, NDArray[np.uint8] | None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there is any reply."""
        return bool(self.stepped or self.began or self.built or self.failures or self.pictures)


class EnvBackend(Protocol):
    """The place where the envs of a vector live: one env for each of `width` lanes. Backends derive from it.

    Only `step_wait` and `close` block. Inline envs are the exception: there each call does its work at once. A lane
    that has failed has no env until it is rebuilt.
    """

    width: int
    spaces: Spaces
    gym_spaces: tuple[Any, Any]
    """The observation and action space of each env, as gymnasium has them."""
    observations: dict[str, NDArray[Any]]
    """The newest observation of each lane: "obs/..." -> (width, *shape). Valid until the lane is stepped or reset."""
    tasks: dict[int, Mapping[str, Any]]
    """Lane -> the values of the task for its resets."""
    replies_at_once: bool
    """True if each call has its reply in the next `step_wait`, so that no step is ever in flight."""
    resets_ahead: bool
    """True if `step_async` takes seeds, and resets a lane in the step that ends its episode."""
    renders: bool = True
    """True if `render` can be called."""

    @property
    def env_hosts(self) -> EnvHostsHere | None:
        """Return the env hosts of these envs; None for envs elsewhere."""
        return None

    def env_at(self, lane: int) -> Any:
        """Return the lane's env, a placeholder where the env is out of reach, or None if the lane has none yet."""

    def tell_tasks(self, tasks: Mapping[int, Task | None]) -> None:
        """Reset these lanes, which have no order under way, with their tasks from now on."""
        for lane, task in tasks.items():
            if task is not None:
                self.tasks[lane] = task.values
            else:
                self.tasks.pop(lane, None)

    def step_async(
        self, lanes: Sequence[int] | None, columns: Mapping[str, NDArray[Any]], next_seeds: NextSeeds | None = None
    ) -> None:
        """Have `lanes` (None: all) step with their rows of the policy's action columns, each (width, *shape).

        A lane in `next_seeds` is reset with its seed, or without one, in the same call if the step ends its episode.
        """

    def step_wait(self, timeout_s: float = ..., batch_wait_s: float = ...) -> Replies:
        """Return the replies of envs as soon as there are any, or no replies after `timeout_s`.

        Waits up to `batch_wait_s` longer for steps and resets that are under way.
        """

    def keeps_env(self, lane: int) -> bool:
        """Return whether `reset` resets the env that the lane has now, and does not build another in its place."""
        return True

    def reset(self, lane: int, seed: int | None) -> None:
        """Have the lane's env reset, without a seed if that is None. The reply is in `began`, or a failure."""

    def begin(self, lanes: Sequence[int]) -> None:
        """Show the first observations of episodes whose reset was in `began`."""
        return

    def rebuild(self, lane: int) -> None:
        """Have the lane's env built again. The reply is in `built`, or a failure."""

    def close_env(self, lane: int) -> None:
        """Close the env of a lane that has failed, if it is still there."""
        return

    def leave_host(self, lane: int, failing: Set[int], why: str) -> bool:
        """Return whether `lane`, which has failed too often, now waits for another host, because its own one is bad.

        That is so if all lanes there are in `failing`, while lanes of other hosts work. The host then loses its other
        lanes too. `why` tells of the newest failure.
        """
        return False

    def render(self, lane: int) -> None:
        """Render the lane's idle env. The reply is in `pictures`."""
        return

    def close(self) -> None:
        """Close all envs, within one time limit for all of them."""


class EnvPlaceholder(gym.Env[Any, Any]):
    """Has the spaces of an env that lives in another process or on another host. It cannot be reset or stepped."""

    def __init__(self, index: int, spaces: tuple[Any, Any]) -> None:
        self.observation_space, self.action_space = spaces
        self._index = index

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Raise `EnvError`."""
        raise EnvError(
            f"env {self._index} lives in another process or on another host; take env_placement = 'inline' to reach it"
        )

    def step(self, action: Any) -> Any:
        """Raise `EnvError`."""
        self.reset()


class PoolBackend(EnvBackend, Protocol):
    """A backend whose envs are in other processes or on other hosts.

    A failed lane lost its env when it failed, or loses it when `rebuild` builds another: `close_env` does nothing.
    """

    replies_at_once: bool = False
    resets_ahead: bool = True
    first: dict[str, NDArray[Any]]
    """As `observations`, for the first observation of an episode that `begin` has not shown yet."""
    actions: dict[str, NDArray[Any]]
    """"actions/..." -> (width, *shape): the next action of each lane; `step_async` writes it."""
    rewards: NDArray[np.float64]
    """(width,): of the last step."""
    note_outside: NoteOutside | None = None
    """Called for observations outside their Box; no lane is reset before it is set."""

    def env_at(self, lane: int) -> Any:
        """Return a placeholder for the lane's env."""
        return EnvPlaceholder(lane, self.gym_spaces)

    def take_spaces(self, spaces: Spaces) -> None:
        """Take the spaces of the first env that was built."""
        self.spaces = spaces
        self.gym_spaces = to_gym(spaces.observation), to_gym(spaces.action)

    def begin(self, lanes: Sequence[int]) -> None:
        """Show these lanes the first observation of their next episode."""
        for name, column in self.observations.items():
            column[lanes] = self.first[name][lanes]
