"""What becomes of the episodes of a policy server's sessions, step by step. Does no I/O.

Each step goes to the sampler once, however often it is asked for and on whatever connection: while it is under way the
newest request is the one that is answered, and afterwards the answer is remembered until the next step is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.episode_errors import (
    EpisodeAbortedError,
    EpisodeCompletedError,
    EpisodesClosedError,
    EpisodeStartedError,
    UnknownEpisodeError,
)
from headrace.schemas.errors import HeadraceError
from headrace.schemas.serving_errors import ServerFullError, StepOrderError, SupersededError
from headrace.schemas.serving_messages import AnyStep, EpisodeAbort, EpisodeAnswer, EpisodeStart
from headrace.schemas.wire import MessageKind
from headrace.workers.serving.open_episodes import OpenEpisodes, StepAnswer
from headrace.workers.serving.session_records import (
    Address,
    EpisodeRecord,
    Reply,
    ServingLimits,
    SessionRecord,
    find,
    over_error,
    refusal_of,
)

CLIENT_LEFT = "client_left"
"""Why an episode is aborted: its client gave it up, or ended the session."""
_GONE = (EpisodeAbortedError, EpisodeCompletedError, EpisodesClosedError, UnknownEpisodeError)
"""What the table says of an episode that it has lost, or given up by itself."""
_ENDS = {"no": ChunkEnd.ONGOING, "terminated": ChunkEnd.TERMINATED, "truncated": ChunkEnd.TRUNCATED}


class SessionEpisodes:
    """Those of all sessions. `post` brings an answer of the sampler to the thread that calls `answered`."""

    def __init__(
        self, table: OpenEpisodes, post: Callable[[EpisodeRecord, StepAnswer], None], limits: ServingLimits
    ) -> None:
        self._table, self._post, self._limits = table, post, limits
        self.outbox: list[tuple[Address, Reply]] = []
        """What is to be sent, and where."""

    def start(self, session: SessionRecord, start: EpisodeStart) -> Reply:
        """Begin an episode. Raises `EpisodeError`, `ServerFullError`."""
        episode = session.open.get(start.episode)
        if episode is None:
            if start.episode in session.ended:
                raise over_error(start.episode, session.ended[start.episode].over)
            if len(session.open) >= self._limits.max_episodes:
                raise ServerFullError(f"this session has {len(session.open)} open episodes, the most it may have")
            self._table.start(start.episode, training_enabled=start.training_enabled)
            session.open[start.episode] = EpisodeRecord(session, start.episode, start.training_enabled)
        elif episode.step or episode.reply_to is not None or episode.training_enabled != start.training_enabled:
            raise EpisodeStartedError(start.episode)
        return Reply.of(EpisodeAnswer(request=start.request, episode=start.episode, next_step=0))

    def step(
        self, session: SessionRecord, step: AnyStep, address: Address, observation: Any, action: Any
    ) -> Reply | None:
        """Take a step, which is answered in time, or say again what was said of it. Raises as the table does."""
        episode = find(session, step.episode)
        if step.step == episode.step and episode.over is None and episode.reply_to is None:
            episode.reply_to, episode.reply_number = address, step.request
            self._give(episode, step, observation, action)
            return None
        return self._step_again(episode, step, address)

    def _step_again(self, episode: EpisodeRecord, step: AnyStep, address: Address) -> Reply | None:
        """What was asked for before, or cannot be."""
        if step.step == episode.step - 1 and episode.last is not None:
            last = episode.last
            return Reply(last.kind, {**last.fields, "request": step.request}, last.action)
        if episode.over is not None:
            raise over_error(step.episode, episode.over)
        if step.step != episode.step:
            raise StepOrderError(
                f"step {step.step} of episode {step.episode!r} is not the next one, which is {episode.step}"
            )
        earlier, episode.reply_to = episode.reply_to, address
        earlier_as, episode.reply_number = episode.reply_number, step.request
        if earlier is not None and earlier != address:
            detail = f"step {step.step} of episode {step.episode!r} was asked for again, and is answered there"
            self.outbox.append((earlier, refusal_of(SupersededError(detail), earlier_as)))
        return None

    def _give(self, episode: EpisodeRecord, step: AnyStep, observation: Any, action: Any) -> None:
        """To the sampler, which answers in time."""
        end = _ENDS[step.end]
        episode.ends = end is not ChunkEnd.ONGOING
        episode.wants_action = not (episode.ends or step.off_policy)
        on_answer = partial(self._post, episode)
        try:
            self._table.take_step(episode.id, step.news, observation, on_answer, action=action, end=end)
        except HeadraceError as error:
            episode.reply_to = None
            if isinstance(error, _GONE):
                self._end(episode, str(error))
            raise

    def abort(self, session: SessionRecord, abort: EpisodeAbort) -> None:
        """The client gives an episode up. Raises `EpisodeError`."""
        episode = find(session, abort.episode)
        if episode.over == "":
            raise EpisodeCompletedError(abort.episode)
        if episode.over is None:
            reason = abort.reason or CLIENT_LEFT
            self.give_up(episode, reason)
            self._end(episode, reason)

    def answered(self, episode: EpisodeRecord, answer: StepAnswer) -> None:
        """The sampler has said what comes of the step that is under way."""
        address, episode.reply_to = episode.reply_to, None
        if address is None or episode.over is not None:
            return
        episode.step += 1
        if answer.error is not None:
            episode.last = refusal_of(answer.error, episode.reply_number)
            self._end(episode, str(answer.error))
        else:
            episode.last = _answer(episode, answer)
            if episode.ends:
                self._end(episode, "")
        self.outbox.append((address, episode.last))

    def _end(self, episode: EpisodeRecord, reason: str) -> None:
        ended = episode.session.ended
        episode.over = reason
        ended[episode.id] = episode.session.open.pop(episode.id)
        if len(ended) > self._limits.remembered_episodes:
            ended.popitem(last=False)

    def give_up(self, episode: EpisodeRecord, reason: str) -> None:
        """The table, and who waits for a step of it, are told that the episode will never finish."""
        with suppress(HeadraceError):  # the sampler may have lost it already
            self._table.abort(episode.id, reason)
        address, episode.reply_to = episode.reply_to, None
        if address is not None:
            self.outbox.append((address, refusal_of(EpisodeAbortedError(episode.id, reason), episode.reply_number)))


def _answer(episode: EpisodeRecord, answer: StepAnswer) -> Reply:
    """An `EpisodeAnswer`, without a check of what was made here."""
    fields = {
        "request": episode.reply_number,
        "episode": episode.id,
        "next_step": episode.step,
        "weights": answer.weights,
    }
    return Reply(MessageKind.EPISODE_ANSWER, fields, answer.action if episode.wants_action else None)
