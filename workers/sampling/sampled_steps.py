"""The protocol between a sampler and the steps that it has not cut yet.

One agent's steps are kept by lane (`lane_steps.py`), those of several agents by seat (`agents/seat_steps.py`). For both
kinds, the sampler decides when episodes begin and end, and tells callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import EXPLORE, RANDOM_ACTIONS, ChunkEnd
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.driver import LaneDriver, Pace, external
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.metrics.timers import Timers
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting_module import ActingModule
from headrace.workers.randomness.seeds import SeedTree
from headrace.workers.sampling.cutting import Stamp
from headrace.workers.sampling.episode_view import AnyEpisodeView


@dataclass(frozen=True, slots=True)
class ActionMode:
    """The choice of actions: by the policy, exploring or not, or at random."""

    explore: bool
    random_actions: bool

    @property
    def flags(self) -> int:
        """The mode as flags of the chunk table."""
        return EXPLORE * self.explore | RANDOM_ACTIONS * self.random_actions


class KeptSteps:
    """The attributes that both kinds of `SampledSteps` begin with."""

    def __init__(
        self, config: EnvRunnerConfig, envs: LaneDriver, seeds: SeedTree, totals: RunnerTotals, id_high: int
    ) -> None:
        self.envs = envs
        self.mode = ActionMode(config.explore, random_actions=False)
        """The mode in which actions of the open steps are chosen."""
        self.timers: Timers | None = None
        """Timers of the poll under way; None in most polls, which are not timed."""
        self.reset_polls = 0
        """Lane polls that an env spent on a reset instead of a step."""
        self._in_step = envs.pace is Pace.LOCK_STEP
        self.answered: int | None = None if self._in_step else 0
        """Env steps that were answered; None in lock-step, where each poll answers all."""
        self._external = external(envs)
        self._steps_inline = envs.replies_at_once
        self._seeds = seeds
        self._totals = totals
        self._id_high = id_high
        self._width = config.num_envs
        self._keeps_infos = config.infos == "all"


class PollOutcome(Protocol):
    """The outcome of one poll."""

    failures: list[Failure]
    begun: bool
    """True if episodes began in lanes that had none."""


AnyOutcome = TypeVar("AnyOutcome", bound=PollOutcome)
Cut_co = TypeVar("Cut_co", covariant=True)


class SampledSteps(Protocol[AnyOutcome, Cut_co]):
    """Chooses, takes, keeps and cuts steps. `KeptSteps` says what its attributes are.

    In each poll a sampler calls `act` and `take`, and with the outcome `count`, `record` and `end`. All of these may
    raise `ConnectorError` and `ModuleError`. `is_spoilt_by` says afterwards whether the open steps must be given up.
    """

    mode: ActionMode
    timers: Timers | None
    reset_polls: int
    answered: int | None

    @property
    def envs(self) -> LaneDriver:
        """The lanes of the envs."""

    @property
    def policies(self) -> Mapping[str, ActingModule]:
        """The acting modules, by module id."""

    @property
    def is_open(self) -> bool:
        """Return whether there may be steps that were not cut yet."""

    @property
    def episodes_ended(self) -> int:
        """Number of episodes that finished since the last cut and will be delivered."""

    @property
    def has_pending(self) -> bool:
        """Return whether an action waits for the observation that completes its step."""

    def look(self, lane: Lane, episode: Any) -> AnyEpisodeView:
        """Return how `episode` of the lane stands now."""

    def look_back(self, lane: Lane, episode: Any, failure: Failure) -> AnyEpisodeView:
        """Return how the episode stood when it failed. The view outlives the rows, which are given up."""

    def resume(self, mode: ActionMode, capacity: int) -> None:
        """Let the open episodes go on in new fragments, with room for `capacity` steps."""

    def open_fragments(self, capacity: int) -> None:
        """Make fragments where there are none."""

    def begin(self, started: Sequence[Lane]) -> None:
        """Begin the chunks of the new episodes in these lanes."""

    @property
    def is_masked(self) -> bool:
        """Return whether action masks bind the next actions, so that `unable` may return some."""

    def unable(self) -> list[Failure]:
        """Return a failure for each lane that could act next, and whose action mask is unsound or forbids all."""

    def act(self, weights_seq: int) -> None:
        """Choose and send the actions of all lanes or seats that can act."""

    def take(self) -> AnyOutcome | None:
        """Return the results of the actions, or None if there are none. May wait for envs, as `EnvDriver.poll` does."""

    def is_spoilt_by(self, error: BaseException) -> bool:
        """Return whether the open steps cannot be continued after `error`, raised by any of these or by `begin`."""

    def count(self, outcome: AnyOutcome) -> None:
        """Count the steps that were taken."""

    def record(self, outcome: AnyOutcome) -> None:
        """Store the results of the poll, and pass its observations to connectors."""

    def stepped(self, outcome: AnyOutcome) -> Iterable[tuple[Lane, Any]]:
        """Return the lanes that have stepped, each with its episode."""

    def over(self, outcome: AnyOutcome) -> Mapping[int, ChunkEnd]:
        """Return how episodes have ended, by lane."""

    def withdraw(self, outcome: AnyOutcome, lane: Lane) -> None:
        """Remove the end of the lane's episode from `outcome`, because a callback failed there."""

    def end(self, outcome: AnyOutcome) -> None:
        """End the chunks of the episodes, or agents, that are over."""

    def lose(self, failure: Failure, *, recorded: bool) -> None:
        """Discard the open steps of a failed lane under its reason. `recorded`: the last step is among them."""

    def lose_open(self, reason: Discard) -> None:
        """Discard all open steps of unfinished episodes. Episodes delivered in part get an end marker."""

    def lose_ended(self, reason: Discard) -> None:
        """Discard all steps of ended episodes since the last cut, and the fragments, when no episode goes on."""

    def drop_markers(self) -> None:
        """Drop the end markers that wait for the next cut."""

    def rebuild(self, config: EnvRunnerConfig) -> None:
        """Rebuild all envs and the policy. Connector state is kept where spaces still match."""

    def cut(self, stamp: Stamp, *, keep_open: bool) -> Cut_co:
        """Return the chunks to deliver; with `keep_open` only those of whole episodes."""

    def read_streams(self) -> dict[str, Any]:
        """Return the state of the random streams: plain values and arrays."""

    def accept_streams(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that restores `state`. Raises `StateError` if `state` does not fit."""
