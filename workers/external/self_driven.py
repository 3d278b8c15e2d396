"""The base of external envs of one agent and of several: `run()`, its thread, and calls that wait."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from headrace.schemas.basics.dropped import when_dropped
from headrace.schemas.errors import EnvError
from headrace.schemas.errors.episodes import EpisodeError, EpisodeTimeoutError, NoFreePlaceError
from headrace.schemas.settings.sampling_settings import ENV_CLOSE_TIMEOUT_S, EXTERNAL_PATIENCE_S
from headrace.workers.envs.lane import close_envs
from headrace.workers.external.calls import Answer, OnAnswer
from headrace.workers.external.episodes import EpisodeTable

AnyTable = TypeVar("AnyTable", bound=EpisodeTable[Any])


class SelfDrivenEnv(Generic[AnyTable]):
    """An env that drives itself: `run` has a thread of its own, and drives the episodes of a table."""

    _episodes: AnyTable | None = None

    # -- what users override ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Drive episodes for ever. If it returns or raises, that is a failure, and the env is rebuilt as usual."""
        raise NotImplementedError(f"{type(self).__name__} must override run(), which drives its episodes")

    def close(self) -> None:
        """Unblock `run` if it waits for something outside the env. Another thread calls this when the env is closed."""

    # -- what `run` calls ---------------------------------------------------------------------------------------------

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        """Open an episode and return its id. Waits for a free place, at most 300 s.

        Without `training_enabled`, the learner gets no chunks of the episode. Raises `NoFreePlaceError` after the wait.
        """
        episodes = self.episodes
        until = time.monotonic() + EXTERNAL_PATIENCE_S
        while True:
            try:
                return episodes.start(episode_id, training_enabled=training_enabled)
            except NoFreePlaceError as error:
                if not episodes.wait_for_place(max(until - time.monotonic(), 0.0)):
                    raise NoFreePlaceError(error.episode_id, error.capacity, EXTERNAL_PATIENCE_S) from error

    def task_of(self, episode_id: str) -> dict[str, Any] | None:
        """Return the task with which the episode is to begin, as a teacher published it; None without one."""
        return self.episodes.task_of(episode_id)

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """Return the current policy's action. Blocks until it is computed, at most 300 s.

        With several agents, return the actions of all observed agents that are not done. At least one has to act.
        """
        return self._wait(episode_id, partial(self.episodes.ask, episode_id, observation), "get_action()")

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        """Log an action that the caller chose. Blocks until it is recorded, at most 300 s.

        With several agents, give one for each observed agent that is not done.
        """
        self._wait(episode_id, partial(self.episodes.log_action, episode_id, observation, action), "log_action()")

    def end_episode(self, episode_id: str, observation: Any, truncated: bool = False) -> None:
        """End the episode with this observation. Does not block. Its place is free once the end is recorded.

        An agent of several without an observation here ends with the one it acted on. A truncated agent needs its final
        observation, unless `missing_final_observation` says otherwise.
        """
        self.episodes.end(episode_id, observation, lambda _: None, truncated=truncated)

    def run_in_threads(self, drive: Callable[[int], None], threads: int) -> NoReturn:
        """Call drive(0), ... drive(threads - 1), each in a thread. Raise the error of the first thread that ends.

        The other threads end with their next call. Raises `EnvError` if a thread returned. Call it from `run`.
        """
        ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def run(number: int) -> None:
            try:
                drive(number)
            except BaseException as error:  # noqa: BLE001 - a user's env
                ended.put(error)
            else:
                ended.put(_returned(f"thread {number} of {type(self).__name__}"))

        for number in range(threads):
            name = f"run-{type(self).__name__}-{number}"
            threading.Thread(target=run, args=(number,), name=name, daemon=True).start()
        raise ended.get()

    # -- the table ----------------------------------------------------------------------------------------------------

    def attach(self, episodes: AnyTable) -> None:
        """Send calls to the table `episodes` from now on. Called before `run`."""
        self._episodes = episodes

    @property
    def episodes(self) -> AnyTable:
        """The table behind these methods, whose own methods do not block. Raises `EnvError` before `run` is called."""
        if self._episodes is None:
            raise EnvError(f"{type(self).__name__} is in no runner yet; drive episodes in run(), which a runner calls")
        return self._episodes

    def _wait(self, episode_id: str, say: Callable[[OnAnswer], None], call: str) -> Any:
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        try:
            say(answers.put)
            answer = answers.get(timeout=EXTERNAL_PATIENCE_S)
        except (queue.Empty, KeyboardInterrupt, SystemExit) as caught:
            error: BaseException = caught
            if isinstance(caught, queue.Empty):
                error = EpisodeTimeoutError(episode_id, call, EXTERNAL_PATIENCE_S)
            with suppress(EpisodeError):  # it is over already
                # because it is unknown whether the action was taken
                self.episodes.abort(episode_id, str(error) or f"{call} was interrupted")
            raise error from None
        if answer.error is not None:
            raise answer.error
        return answer.action


logger = logging.getLogger(__name__)


class RunThread:
    """The thread of an env that is attached to a table. Once `run()` has ended, the table accepts nothing more.

    It stops if `owner` is dropped without calling `stop()`.
    """

    def __init__(self, env: SelfDrivenEnv[Any], owner: object) -> None:
        self.env = env
        sentence = f"the runner of a {type(env).__name__} was dropped without stop()"
        self._dropped = when_dropped(owner, sentence, self.stop)
        self._error: BaseException = _returned(type(env).__name__)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"run-{type(env).__name__}", daemon=True)

    def start(self) -> None:
        """Start the thread, which calls `run()`."""
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended `run()`; None while it goes on."""
        return self._error if self._ended.is_set() else None

    def _run(self) -> None:
        try:
            self.env.run()
        except BaseException as error:  # noqa: BLE001 - a user's env
            self._error = error
        finally:
            # Close first: when the sampler sees the failure, the table already has all earlier calls.
            self.env.episodes.close(f"run() of the env has ended ({type(self._error).__name__}: {self._error})")
            self._ended.set()

    def stop(self) -> None:
        """Close the env so that `run()` ends. Wait at most 5 s, because a thread cannot be killed."""
        self._dropped.detach()
        deadline = time.monotonic() + ENV_CLOSE_TIMEOUT_S
        self.env.episodes.close("the env was closed")
        self.env.episodes.release_all()
        close_envs([self.env])
        if self._thread.ident is not None:
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning(
                "%s did not end within %g s; it is abandoned, and all it may ask for is refused",
                self._thread.name,
                ENV_CLOSE_TIMEOUT_S,
            )


def _returned(env: str) -> EnvError:
    return EnvError(f"run() of {env} returned; it must drive episodes until it is told to stop")
