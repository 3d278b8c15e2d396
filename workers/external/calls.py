"""Calls of the drivers of external episodes, until the sampler takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Space
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import EnvContractError, HeadraceError
from headrace.workers.envs.bounds import LARGEST_REWARD
from headrace.workers.envs.checks import check_rewards
from headrace.workers.envs.observations import Farthest, NoteOutside, Observations

Row = Mapping[str, NDArray[Any]]
"""A value of a space by column name, each leaf without a leading axis."""


class DriverLoop(Protocol):
    """The event loop that serves the drivers of episodes. The sampler's thread runs it while it waits."""

    def run_once(self, timeout_s: float) -> None:
        """Run the loop until something has happened, at most `timeout_s`."""

    def flush(self) -> None:
        """Send the answers now, without waiting."""


@dataclass(slots=True)
class Answer:
    """The answer to a call: an action in the nesting of the space, chosen by weights of a version; or an `error`.

    With several agents, the action is a dict by agent, for the agents that act. The answer to a logged action repeats
    that action. The answer to the end of an episode has no action.
    """

    action: Any = None
    weights: tuple[int, int] = (0, 0)
    """(learner_epoch, seq)."""
    error: HeadraceError | None = None


OnAnswer = Callable[[Answer], None]
"""Called once, in the sampler's thread. Must not block."""


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """An observation, answered by an action or by the end of the episode. `info` belongs to the previous action."""

    place: EpisodePlace
    on_answer: OnAnswer
    info: dict[Any, Any]
    end: ChunkEnd = ChunkEnd.ONGOING


@dataclass(slots=True, eq=False, kw_only=True)
class SoloCall(Call):
    """A call for one agent: its observation `row`, and its `reward` since the previous action."""

    row: Row
    reward: float
    logged: Row | None = None
    """The action that the driver took already, in columns "actions/..."."""


@dataclass(slots=True, eq=False)
class EpisodePlace:
    """The place of one open episode. `lane` is its row in the sampler's columns."""

    lane: int
    episode_id: str
    training_enabled: bool
    call: Call | None = None
    """The call without an answer."""
    has_acted: bool = False
    task: Task | None = None
    """The task that its driver was told at the start."""
    released: bool = False
    """True once the episode is over. Another episode may have the lane by now."""


@dataclass(slots=True, eq=False)
class SoloPlace(EpisodePlace):
    """The place of one agent's episode, with the reward and info logged since its last action."""

    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)


def add_reward(total: float, reward: Any) -> float:
    """Return the sum. Raises `EnvContractError` unless the sum and `reward` are finite and in range."""
    if type(reward) is not float or not abs(reward) <= LARGEST_REWARD:  # otherwise a plain float, the usual case
        checked, problems = check_rewards([reward], [0], ["not known here"])
        if problems:
            raise problems[0][1]
        reward = float(checked[0])
    total += reward
    if not abs(total) <= LARGEST_REWARD:
        raise EnvContractError("sum of rewards since the last action", str(total), f"within {LARGEST_REWARD:.3g}")
    return total


class RowReader:
    """Checks values of one space and turns them into rows, for one thread at a time."""

    def __init__(self, space: Space, root: str, what: str, note_outside: NoteOutside | None = None) -> None:
        def note(observations: int, farthest: Farthest) -> None:
            if note_outside is not None:
                note_outside(observations, {self._named(part): far for part, far in farthest.items()})

        self._checker = Observations(space, 1, note_outside=None if note_outside is None else note)
        self._root, self._what = root, what

    def _named(self, part: str) -> str:
        return part.replace("observation", self._what, 1)

    def read(self, value: Any) -> dict[str, NDArray[Any]]:
        """Return `value` as a row, which is a copy. Raises `EnvContractError` for a value outside the space."""
        problems = self._checker.put(None, [value])
        if problems:
            error = problems[0][1]
            raise EnvContractError(self._named(error.what), error.seen, error.expected)
        columns = self._checker.columns.items()
        return {self._root + name.removeprefix("obs"): column[0].copy() for name, column in columns}
