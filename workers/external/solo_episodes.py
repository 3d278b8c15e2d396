"""The table of open episodes of one agent."""

from __future__ import annotations

from typing import Any

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors.episodes import EpisodeError
from headrace.workers.envs.checks import check_info, own_info
from headrace.workers.external.calls import Call, OnAnswer, Row, RowReader, SoloCall, SoloPlace, add_reward
from headrace.workers.external.episodes import EpisodeTable


class ExternalEpisodes(EpisodeTable[SoloPlace]):
    """The episodes of one agent, with the env's own `spaces`."""

    def __init__(self, spaces: Spaces, capacity: int, *, check_bounds: bool = True, takes_logged: bool = True) -> None:
        super().__init__(capacity, takes_logged=takes_logged)
        self.spaces = spaces
        self._observations = RowReader(spaces.observation, "obs", "observation", check_bounds=check_bounds)
        self._actions = RowReader(spaces.action, "actions", "action", check_bounds=True)

    def log_returns(self, episode_id: str, reward: float, info: dict[str, Any] | None = None) -> None:
        """Add `reward` to that of the last action. `info`, if given, replaces the info of this step.

        Raises `EnvContractError` for a reward that is no finite number or an info that is no dict; `EpisodeError`.
        """
        told = None if info is None else own_info(info)
        with self._lock:
            place = self._find(episode_id)
            if not place.has_acted:
                raise EpisodeError(episode_id, "no_action")
            place.earn(reward)
            if told is not None:
                place.info = told

    def take_step(
        self,
        episode_id: str,
        news: tuple[Any, ...],
        observation: Row,
        on_answer: OnAnswer,
        *,
        action: Row | None = None,
        end: ChunkEnd = ChunkEnd.ONGOING,
    ) -> None:
        """Call `log_returns` with `news`, then `ask`, `log_action` or `end`, as one call. Raises the same errors.

        The caller has checked that both rows are in their spaces, and does not change them afterwards.
        """
        reward, info = news or (0.0, None)
        if action is not None and not self._takes_logged:
            raise EpisodeError(episode_id, "cannot_log")
        if info is not None:
            check_info(info)
        with self._lock:
            place = self._find(episode_id)
            if news and not place.has_acted:
                raise EpisodeError(episode_id, "no_action")
            earned = add_reward(place.reward, reward)
            told, place.info, place.reward = place.info if info is None else info, {}, 0.0
            self._admit(
                SoloCall(
                    place=place, on_answer=on_answer, info=told, end=end, row=observation, reward=earned, logged=action
                )
            )

    def _new_place(self, lane: int, episode_id: str, training_enabled: bool) -> SoloPlace:
        return SoloPlace(lane, episode_id, training_enabled)

    def _new_call(
        self, place: SoloPlace, observation: Any, on_answer: OnAnswer, action: tuple[Any] | None, end: ChunkEnd
    ) -> Call:
        row = self._observations.read(observation)
        logged = self._actions.read(action[0]) if action is not None else None
        earned, place.reward, info, place.info = place.reward, 0.0, place.info, {}
        return SoloCall(place=place, on_answer=on_answer, info=info, end=end, row=row, reward=earned, logged=logged)
