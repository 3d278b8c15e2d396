"""The table of open episodes of one agent."""

from __future__ import annotations

from typing import Any

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors.episodes import EpisodeError
from headrace.workers.envs.observations import NoteOutside
from headrace.workers.external.calls import Call, OnAnswer, Row, RowReader, SoloCall, SoloPlace, add_reward
from headrace.workers.external.episodes import EpisodeTable, Tell


class ExternalEpisodes(EpisodeTable[SoloPlace]):
    """The episodes of one agent, with the env's own `spaces`."""

    def __init__(
        self,
        spaces: Spaces,
        capacity: int,
        tell: Tell,
        *,
        note_outside: NoteOutside | None = None,
        takes_logged: bool = True,
    ) -> None:
        super().__init__(capacity, tell, takes_logged=takes_logged, note_outside=note_outside)
        self.spaces = spaces
        self._observations = RowReader(spaces.observation, "obs", "observation", note_outside)
        self._actions = RowReader(spaces.action, "actions", "action")

    def log_returns(self, episode_id: str, reward: float, info: dict[str, Any] | None = None) -> None:
        """Add `reward` to that of the last action. `info`, if given, replaces the info of this step.

        Raises `EnvContractError` for a reward that is no finite number or an info that is no dict; `EpisodeError`.
        """
        with self._lock:
            self._note(self._find(episode_id), reward, info)

    def _note(self, place: SoloPlace, reward: Any, info: Any) -> None:
        if not place.has_acted:
            raise EpisodeError(place.episode_id, "no_action")
        told = place.info if info is None else self._tell(info)
        place.reward, place.info = add_reward(place.reward, reward), told

    def _take_news(self, place: SoloPlace, news: tuple[Any, ...], seen: Row, action: Any, end: ChunkEnd) -> None:
        if news:
            self._note(place, *news)

    def _new_place(self, lane: int, episode_id: str, training_enabled: bool) -> SoloPlace:
        return SoloPlace(lane, episode_id, training_enabled)

    def _new_call(
        self, place: SoloPlace, observation: Any, on_answer: OnAnswer, action: tuple[Any] | None, end: ChunkEnd
    ) -> Call:
        row = self._observations.read(observation)
        return self._call(place, row, on_answer, self._actions.read(action[0]) if action is not None else None, end)

    def _call(self, place: SoloPlace, row: Row, on_answer: OnAnswer, logged: Row | None, end: ChunkEnd) -> SoloCall:
        earned, place.reward, info, place.info = place.reward, 0.0, place.info, {}
        return SoloCall(place=place, on_answer=on_answer, info=info, end=end, row=row, reward=earned, logged=logged)
