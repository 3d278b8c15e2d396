"""The lanes of an external env: places for episodes that drive themselves and are never stepped or reset."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import CallbackError, ConfigError, EnvContractError, HeadraceError
from headrace.schemas.errors.episodes import ClientLostError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.creators import find_creator, naming_what_failed
from headrace.workers.envs.driver import LaneDriver, Pace
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode
from headrace.workers.envs.lane_table import WAIT_SLICE_S, LaneTable
from headrace.workers.envs.recovery import SharedRecovery
from headrace.workers.envs.sequential_step import Outcome
from headrace.workers.external.calls import Call, EpisodePlace
from headrace.workers.external.episodes import EpisodeTable
from headrace.workers.external.self_driven import RunThread, SelfDrivenEnv
from headrace.workers.metrics.timers import WAIT

logger = logging.getLogger(__name__)

_NOTHING, _NO_LANE = np.empty(0), np.empty(0, np.intp)
_GIVEN_UP = "its worker has given it up (a reset, other weights of a new learner, an error there, or its end)"


class ExternalLanes(LaneDriver):
    """Lanes of one external env, which is the env of each of them. A lane is a place for one open episode.

    A lane is live from its episode's first observation on. It is under way from the answer to one observation until the
    next observation, however long that takes. `first` is an env that was built to find out its kind.
    """

    pace = Pace.EXTERNAL
    seeds_every_episode = False
    replies_at_once = False
    episodes: Any
    """The table of the episodes."""

    def __init__(self, table: LaneTable, first: Any = None) -> None:
        self.lanes = table.lanes
        self.halves: list[NDArray[np.intp]] = []
        self.read_version: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns (learner_epoch, seq) of the weights that act."""
        self._table = table
        self._recovery = SharedRecovery(table, self._rebuild, self._take_down)
        self._run: RunThread | None = None
        """The env that is up; None while it waits to be built again."""
        self.build(table.config, first)

    # -- what each kind of external env defines -----------------------------------------------------------------------

    _episode_kind: type[Episode] = Episode
    """The class of the episodes."""

    _env_kind: type[SelfDrivenEnv[Any]]
    """The class of the env, and in `_made` an attribute that its constructor sets."""
    _made: str

    @abstractmethod
    def _learn_spaces(self, env: Any) -> None:
        """Take the spaces of the first env since `build`."""

    @abstractmethod
    def _check_spaces(self, env: Any) -> None:
        """Raise `EnvContractError` unless the env has the spaces of the previous env."""

    @abstractmethod
    def _new_table(self) -> EpisodeTable[Any]:
        """Return a table for the episodes of an env of these spaces."""

    @abstractmethod
    def _see_first(self, call: Call) -> None:
        """Take the first observation of the episode in the lane of `call`."""

    @abstractmethod
    def _hear(self, call: Call, outcome: Outcome) -> float:
        """Take in the result of the action under way. Return its reward, or 0 with several agents."""

    # -- one env after another ----------------------------------------------------------------------------------------

    def build(self, config: EnvRunnerConfig, first: Any = None) -> None:
        """Build the env, after closing any earlier one. Raises if it cannot be built."""
        self.heard_at = time.monotonic()
        """Time of the last message from a driver of an episode, in monotonic seconds."""
        self._batch_wait_s = (config.remote_env_batch_wait_ms or 0.0) / 1000.0
        table = self._table
        table.config = config
        self._creator = find_creator(config.env)
        self.stop()
        self._recovery.begin()
        try:
            with naming_what_failed(config, 0):
                env = self._checked(self._creator(table.new_context(0)) if first is None else first)
            self._learn_spaces(env)
            self._adopt(env)
        except HeadraceError:
            self.stop()
            raise

    def _checked(self, env: Any) -> SelfDrivenEnv[Any]:
        """Return `env`. Raises unless it is an external env of this kind whose constructor was called."""
        if not isinstance(env, self._env_kind):
            seen = f"{type(env).__module__}.{type(env).__qualname__}"
            raise EnvContractError("environment", seen, f"an {self._env_kind.__name__}")
        if not hasattr(env, self._made):
            raise ConfigError(
                f"{type(env).__name__} must call super().__init__(action_space, observation_space)", key="env"
            )
        return env

    def _adopt(self, env: SelfDrivenEnv[Any]) -> None:
        """Start `env` with its own table. Threads of the previous env find their table closed."""
        lanes, draws = self.lanes, self._table.tasks  # not `self`, which `RunThread` watches
        self.episodes = self._new_table()
        self.episodes.draw_task = lambda lane: draws.peek(lane, lanes[lane].episodes_begun)[1]
        env.attach(self.episodes)
        for lane in self.lanes:
            lane.env = env  # type: ignore[assignment]
        self._run = RunThread(env, self)
        self._table.tell_created(0)
        self._run.start()

    def stop(self) -> None:
        """Close the env, within 5 s."""
        self._take_down()
        self._table.forget()

    def _take_down(self) -> None:
        drive, self._run = self._run, None
        self._places: dict[int, EpisodePlace] = {}
        """Places of the lanes that are live, by lane."""
        self._under_way: set[int] = set()
        for lane in self.lanes:
            lane.release()
        if drive is not None:
            drive.stop()

    def _rebuild(self) -> None:
        if self.on_rebuild is not None:
            self.on_rebuild()
        context = self._table.new_context(0, recreated=True)
        try:
            env = self._checked(self._creator(context))
            self._check_spaces(env)
            self._adopt(env)
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            self._table.failed.append(Failure(0, error, at="construction"))

    # -- which lanes are up -------------------------------------------------------------------------------------------

    @property
    def live(self) -> NDArray[np.intp] | None:
        """Lanes with an episode, None when all have one."""
        live = [lane.index for lane in self.lanes if lane.episode is not None]
        return None if len(live) == len(self.lanes) else np.array(live, np.intp)

    @property
    def under_way(self) -> set[int]:
        """Live lanes whose driver got an action and has not reported its result."""
        return set(self._under_way)

    def why_no_tasks(self, group: int) -> str:
        """Return why the episodes take no tasks: in groups, they would have to begin with one seed."""
        return "drivers of external episodes seed them, so tasks have no groups here; publish without" if group else ""

    @property
    def open_episodes(self) -> int:
        """See `ExternalDriver`."""
        return int(self.episodes.counts()["open"])

    @property
    def asking(self) -> NDArray[np.intp]:
        """Live lanes with nothing under way, in order: a driver waits for each."""
        return np.array(sorted(self._places.keys() - self._under_way), np.intp)

    @property
    def repairing(self) -> bool:
        """Return whether there is something to do before the next poll."""
        return bool(self._table.failed or self._table.started) or self._run is None

    # -- taking in ----------------------------------------------------------------------------------------------------

    def poll(self) -> Outcome:
        """Return the results that drivers have reported. Waits only for a moment, because a driver may never come."""
        outcome = Outcome(_NOTHING, [], [], lanes=_NO_LANE)
        if self._run is None:
            self._table.sleep_until_due()
            return outcome
        with self._table.totals.timers.budget.spent_on(WAIT):
            self.episodes.wait(WAIT_SLICE_S, self._batch_wait_s)
        failure = self._run.failure
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
        outcome.begun = bool(self._table.started)
        if rewards:
            answered = sorted(rewards)
            outcome.lanes = np.array(answered, np.intp)
            outcome.rewards = np.array([rewards[lane] for lane in answered])
        return outcome

    def _begin(self, call: Call) -> None:
        """Begin the episode whose first observation is in `call`."""
        place, lane = call.place, self.lanes[call.place.lane]
        if call.end is not ChunkEnd.ONGOING:  # the episode ended before its first action: it has no step
            self.episodes.release(place)
            return
        episode = lane.create_episode(None, self._episode_kind)
        episode.trains, episode.task = place.training_enabled, place.task
        episode.custom_data["external_episode_id"] = place.episode_id
        if self.on_episode_created is not None:
            try:
                self.on_episode_created(lane, episode)
            except CallbackError as error:
                self._table.failed.append(Failure(lane.index, error, unbegun=episode))
                self.episodes.release(place, str(error))
                return
        self._places[lane.index] = place
        self._see_first(call)
        lane.begin_episode(episode, call.info)
        self._table.started.append(lane.index)

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
        """Lose every open episode, after `run()` has ended and all its calls were taken in."""
        lanes = [lane.index for lane in self.lanes if lane.episode is not None]
        failures = [Failure(lane, error) for lane in lanes]
        if not failures:
            self._table.failed.append(Failure(0, error, at="run()"))
        self._under_way.clear()
        while self._places:
            self.episodes.release(self._places.popitem()[1], f"run() of its env has ended ({error})")
        return Outcome(np.zeros(len(lanes)), [], failures, begun=True, lanes=np.array(lanes, np.intp))

    # -- episodes -----------------------------------------------------------------------------------------------------

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Do nothing: the next episode begins when a driver begins one. It cannot be told to."""

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Drop the episodes of `lanes`. The driver of an abandoned episode gets an error."""
        failed = {failure.lane: str(failure.error) for failure in self._table.failed}
        for index in lanes:
            self.lanes[index].episode = None
            self._under_way.discard(index)
            place = self._places.pop(index, None)
            if place is not None:
                self.episodes.release(place, failed.get(index, _GIVEN_UP))

    # -- when it fails ------------------------------------------------------------------------------------------------

    def try_restart(self) -> None:
        """Handle the failures, and rebuild the env if it failed.

        A client that is gone, or sent an unsound mask, costs only its own episode. The end of `run()` costs all.

        Raises as `EnvDriver.try_restart` does.
        """
        failures, self._table.failed = self._table.failed, []
        for failure in failures:
            if self.on_failure is not None:
                self.on_failure(self.lanes[failure.lane], failure)
        broken = []
        for failure in failures:
            match failure:
                case Failure(error=ClientLostError()) | Failure(error=EnvContractError(), stepped=True):
                    failure.note(self._table.totals.failure_groups, self._table.config.env)
                    logger.warning("at %s: %s; %d steps discarded", failure.at, failure.error, failure.discarded)
                case Failure(error=CallbackError()) if failure.at != "construction":
                    self._charge(failure)
                case _:
                    broken.append(failure)
        if broken:
            self._recovery.restart(broken)

    def _charge(self, failure: Failure) -> None:
        """Count an episode that a callback failed. Rebuilds nothing, but such failures use up the restart budget."""
        failure.note(self._table.totals.failure_groups, self._table.config.env)
        if not self._table.config.restart_failed_sub_environments:
            raise failure.error
        logger.error(
            "the episode in place %d failed at %s (%s); %d steps discarded",
            failure.lane,
            failure.at,
            failure.error,
            failure.discarded,
        )
        self.lanes[0].budget.spend(failure.error, time.monotonic())

    @property
    def _is_up(self) -> bool:
        return True  # `wait_for_one` does not block: `poll` notices new drivers

    def _revive(self) -> None:
        self._recovery.revive()
        self.try_restart()

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        """Return None: an external env has no picture."""
        return None


def keep(action: Any) -> Any:
    """Return a copy that outlives the columns that `action` is a view of."""
    if isinstance(action, dict):
        return {key: keep(value) for key, value in action.items()}
    if isinstance(action, tuple):
        return tuple(map(keep, action))
    return action.copy() if isinstance(action, np.ndarray) else action
