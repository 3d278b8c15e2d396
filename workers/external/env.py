"""What a user writes whose env cannot be stepped: `run()` drives episodes, and asks for actions as it needs them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import gymnasium as gym

from headrace.schemas.episode_errors import EpisodeError, EpisodeTimeoutError, NoFreePlaceError, RunReturnedError
from headrace.schemas.errors import EnvError
from headrace.workers.external.calls import Answer, OnAnswer
from headrace.workers.external.episodes import ExternalEpisodes


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long calls may block, in seconds: the settings "external_..._timeout_s"."""

    start_s: float
    action_s: float
    log_s: float


class ExternalEnv:
    """Base class: give both spaces to the constructor and override `run`, which gets a thread of its own.

        def run(self):
            while True:
                episode = self.start_episode()
                observation = simulator.reset()
                while not simulator.over:
                    observation, reward = simulator.step(self.get_action(episode, observation))
                    self.log_returns(episode, reward)
                self.end_episode(episode, observation)

    As many as `num_envs` episodes may be open at once, driven by as many threads as one likes, each episode by one at a
    time. All methods raise an `EpisodeError` for an id that is unknown, over or busy, an `EnvContractError` for what is
    not in its space, and `EpisodesClosedError` once the env is over: let that end `run` and the threads it began.
    """

    def __init__(self, action_space: gym.Space[Any], observation_space: gym.Space[Any]) -> None:
        self.action_space = action_space
        self.observation_space = observation_space
        self._episodes: ExternalEpisodes | None = None

    # -- what users override ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Drive episodes, for ever. To return, or to raise, is a failure: the env is built anew, by the usual rules."""
        raise NotImplementedError(f"{type(self).__name__} must override run(), which drives its episodes")

    def close(self) -> None:
        """The env is over: have whatever `run` waits for outside come to an end. Called by another thread."""

    # -- what `run` calls ---------------------------------------------------------------------------------------------

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        """Open an episode and give its id. Waits until there is a place for it, at most `external_start_timeout_s`.

        Of one without `training_enabled` nothing goes to the learner. Raises `NoFreePlaceError` after the wait.
        """
        episodes, deadlines = self.episodes, self._deadlines
        until = time.monotonic() + deadlines.start_s
        while True:
            try:
                return episodes.start(episode_id, training_enabled=training_enabled)
            except NoFreePlaceError as error:
                if not episodes.wait_for_place(max(until - time.monotonic(), 0.0)):
                    raise NoFreePlaceError(error.episode_id, error.capacity, deadlines.start_s) from error

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """The current policy's action. Blocks until it is there, at most `external_action_timeout_s`."""
        deadline = self._deadlines.action_s

        def ask(on_answer: OnAnswer) -> None:
            self.episodes.ask(episode_id, observation, on_answer)

        return self._wait(episode_id, ask, "get_action()", "external_action_timeout_s", deadline)

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        """Tell an action that was not asked for. Blocks until it is taken in, at most `external_log_timeout_s`."""
        deadline = self._deadlines.log_s

        def log(on_answer: OnAnswer) -> None:
            self.episodes.log_action(episode_id, observation, action, on_answer)

        self._wait(episode_id, log, "log_action()", "external_log_timeout_s", deadline)

    def log_returns(self, episode_id: str, reward: float, info: dict[str, Any] | None = None) -> None:
        """Add to the reward since the last action. `info` goes with the next observation, and with that one only."""
        self.episodes.log_returns(episode_id, reward, info)

    def end_episode(self, episode_id: str, observation: Any, truncated: bool = False) -> None:
        """The episode has ended with this observation. Does not block; its place is free once that was taken in."""
        self.episodes.end(episode_id, observation, lambda _: None, truncated=truncated)

    def run_in_threads(self, drive: Callable[[int], None], threads: int) -> NoReturn:
        """For `run`: call drive(0), ... drive(threads - 1), each in a thread, and raise what ends the first of them.

        The others then end with their next call. Raises `RunReturnedError` for one that returned.
        """
        ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def run(number: int) -> None:
            try:
                drive(number)
            except Exception as error:  # noqa: BLE001 - a user's env
                ended.put(error)
            else:
                ended.put(RunReturnedError(f"thread {number} of {type(self).__name__}"))

        for number in range(threads):
            name = f"run-{type(self).__name__}-{number}"
            threading.Thread(target=run, args=(number,), name=name, daemon=True).start()
        raise ended.get()

    # -- what drives it -----------------------------------------------------------------------------------------------

    def attach(self, episodes: ExternalEpisodes, deadlines: Deadlines) -> None:
        """From now on calls go to `episodes`. Before `run` is."""
        self._episodes, self._deadlines = episodes, deadlines

    @property
    def episodes(self) -> ExternalEpisodes:
        """The table behind these methods, for who would rather not block. Raises `EnvError` before `run` is called."""
        if self._episodes is None:
            raise EnvError(f"{type(self).__name__} is in no runner yet; drive episodes in run(), which a runner calls")
        return self._episodes

    def _wait(self, episode_id: str, say: Callable[[OnAnswer], None], call: str, setting: str, timeout_s: float) -> Any:
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        say(answers.put)
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            error = EpisodeTimeoutError(episode_id, call, setting, timeout_s)
            self._give_up(episode_id, str(error))
            raise error from None
        if answer.error is not None:
            raise answer.error
        return answer.action

    def _give_up(self, episode_id: str, reason: str) -> None:
        """Nobody would ever know whether the action was taken."""
        try:
            self.episodes.abort(episode_id, reason)
        except EpisodeError:
            return  # it is over already
