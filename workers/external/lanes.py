"""External episodes as the envs of a sampler: whoever has an observation acts, and nobody is stepped or reset."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunk import UNSEEDED, ChunkEnd
from headrace.schemas.episode_errors import ClientLostError
from headrace.schemas.errors import CallbackError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.roster import WAIT_SLICE_S
from headrace.workers.envs.stepping import Outcome
from headrace.workers.external.calls import Call
from headrace.workers.external.whole import WholeExternal

logger = logging.getLogger(__name__)

_NOTHING, _NOBODY = np.empty(0), np.empty(0, np.intp)
_GIVEN_UP = "its worker has given it up (a reset, other weights of a new learner, an error there, or its end)"


class ExternalLanes(WholeExternal):
    """A `ReadyDriver`. A lane is live from its episode's first observation on.

    It is under way from the answer to one observation until the next one, however long that takes.
    """

    seeds_every_episode = False

    def __init__(self, *args: Any, **further: Any) -> None:
        self.halves: list[NDArray[np.intp]] = []
        self.read_version: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Of the weights that act."""
        super().__init__(*args, **further)

    def build(self, config: EnvRunnerConfig, first: tuple[Any, EnvContext] | None = None) -> None:
        """See `Roster`."""
        self.heard_at = time.monotonic()
        """When the table last had something to tell."""
        self._batch_wait_s = (config.remote_env_batch_wait_ms or 0.0) / 1000.0
        super().build(config, first)

    @property
    def live(self) -> NDArray[np.intp] | None:
        """See `EnvDriver`."""
        live = [lane.index for lane in self.lanes if lane.episode is not None]
        return None if len(live) == len(self.lanes) else np.array(live, np.intp)

    @property
    def under_way(self) -> set[int]:
        """See `ReadyDriver`."""
        return set(self._under_way)

    @property
    def asking(self) -> NDArray[np.intp]:
        """Live lanes with nothing under way, in order: somebody waits for each."""
        return np.array(sorted(self._places.keys() - self._under_way), np.intp)

    # -- what the kinds of external env do each in their own way ------------------------------------------------------

    _episode_kind: type[Any]
    """Of `Episode`s; has `trains`."""

    @abstractmethod
    def _see_first(self, call: Call) -> None:
        """The first observation of the episode in the lane of `call`."""

    @abstractmethod
    def _hear(self, call: Call, outcome: Outcome) -> float:
        """What came of the action under way; gives its reward, if that is one number."""

    # -- taking in ----------------------------------------------------------------------------------------------------

    def poll(self) -> Outcome:
        """See `ReadyDriver`; gives up waiting after a moment, for nobody knows whether anyone will ever come."""
        outcome = Outcome(_NOTHING, [], [], lanes=_NOBODY)
        if self._drive is None:
            time.sleep(min(self.next_due_s() or 0.0, WAIT_SLICE_S))
            return outcome
        self.episodes.wait(WAIT_SLICE_S, self._batch_wait_s)
        failure = self._drive.failure
        calls, lost = self.episodes.take()
        if calls or lost:
            self.heard_at = time.monotonic()
        elif failure is not None:
            return self._fail_all(failure)
        rewards: dict[int, float] = {}
        for call in calls:
            if self.lanes[call.place.lane].episode is None:
                self._begin(call)
            else:
                rewards[call.place.lane] = self._take_answer(call, outcome)
        for place, error in lost:
            if self.lanes[place.lane].episode is not None:
                rewards[place.lane] = 0.0
                self._under_way.discard(place.lane)
                outcome.failures.append(Failure(place.lane, error))
            self._places.pop(place.lane, None)
            self.episodes.release(place, error.reason)
        outcome.begun = bool(self._started)
        if rewards:
            answered = sorted(rewards)
            outcome.lanes = np.array(answered, np.intp)
            outcome.rewards = np.array([rewards[lane] for lane in answered])
        return outcome

    def _begin(self, call: Call) -> None:
        """The first observation of an episode."""
        place, lane = call.place, self.lanes[call.place.lane]
        if call.end is not ChunkEnd.ONGOING:  # it was over before anybody acted: nothing to tell
            self.episodes.release(place)
            return
        episode = lane.create_episode(UNSEEDED, self._episode_kind)
        episode.trains = place.training_enabled
        episode.custom_data["external_episode_id"] = place.episode_id
        if self.on_episode_created is not None:
            try:
                self.on_episode_created(lane, episode)
            except CallbackError as error:
                self._failed.append(Failure(lane.index, error, unbegun=episode))
                self.episodes.release(place, str(error))
                return
        self._places[lane.index] = place
        self._see_first(call)
        lane.begin_episode(episode, call.info)
        self._started.append(lane.index)

    def _take_answer(self, call: Call, outcome: Outcome) -> float:
        lane = call.place.lane
        self._under_way.discard(lane)
        reward = self._hear(call, outcome)
        if call.end is not ChunkEnd.ONGOING:
            outcome.ended.append((lane, call.end))
            del self._places[lane]
            self.episodes.release(call.place)
        return reward

    def _fail_all(self, error: BaseException) -> Outcome:
        """`run()` has ended, and all that it said was taken in: every episode that is still open is lost."""
        lanes = [lane.index for lane in self.lanes if lane.episode is not None]
        failures = [Failure(lane, error) for lane in lanes]
        if not failures:
            self._failed.append(Failure(0, error, at="run()"))
        self._under_way.clear()
        while self._places:
            self.episodes.release(self._places.popitem()[1], f"run() of its env has ended ({error})")
        return Outcome(np.zeros(len(lanes)), [], failures, begun=True, lanes=np.array(lanes, np.intp))

    # -- episodes -----------------------------------------------------------------------------------------------------

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Nobody outside can be reset: the next episode begins when somebody begins one."""

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """See `EnvDriver`. Whoever drives one that is abandoned is told so by an error."""
        for index in lanes:
            self.lanes[index].episode = None
            self._under_way.discard(index)
            place = self._places.pop(index, None)
            if place is not None:
                self.episodes.release(place, _GIVEN_UP)

    def try_restart(self) -> None:
        """See `EnvDriver`. Who drove an episode and is gone costs that episode only, what `run()` does all of them."""
        failures, self._failed = self._failed, []
        for failure in failures:
            if self.on_failure is not None:
                self.on_failure(self.lanes[failure.lane], failure)
        broken = []
        for failure in failures:
            match failure.error:
                case ClientLostError() as error:
                    logger.warning("%s; %d steps discarded", error, failure.discarded)
                case CallbackError() if failure.at != "construction":
                    self._charge(failure)
                case _:
                    broken.append(failure)
        if broken:
            self._restart(broken)


def keep(action: Any) -> Any:
    """A copy that outlives the columns it is a view of."""
    if isinstance(action, dict):
        return {key: keep(value) for key, value in action.items()}
    if isinstance(action, tuple):
        return tuple(map(keep, action))
    return action.copy() if isinstance(action, np.ndarray) else action
