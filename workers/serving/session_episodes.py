"""The episodes of a policy server's sessions, step by step.

Requests are idempotent: a step goes to the sampler once, however often and on which connection a client repeats it.
While the step is under way, its newest request gets the answer. Afterwards the answer is kept until the next step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import HeadraceError
from headrace.schemas.errors.episodes import EpisodeAbortedError, EpisodeError, NoFreePlaceError
from headrace.schemas.errors.serving import ServingError, code_of
from headrace.schemas.frames.wire import MessageKind
from headrace.workers.external.agent_episodes import ExternalAgentEpisodes
from headrace.workers.external.calls import Answer
from headrace.workers.external.solo_episodes import ExternalEpisodes
from headrace.workers.serving.serving_messages import (
    AnyStep,
    EpisodeAbort,
    EpisodeAnswer,
    EpisodeStart,
    another_request_error,
    bytes_of,
)
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

ServedEpisodes = ExternalEpisodes | ExternalAgentEpisodes
"""The table of open episodes, of one agent or of several."""
_NEWEST = 256
"""Steps whose latencies count."""
CLIENT_LEFT = "client_left"
"""The reason of episodes that their client gave up, or whose session it ended."""
_GONE = ("aborted", "already_completed", "closed", "unknown_episode")
"""Codes of errors of the table that mean that the episode is over there."""
_ENDS = {"no": ChunkEnd.ONGOING, "terminated": ChunkEnd.TERMINATED, "truncated": ChunkEnd.TRUNCATED}


class SessionEpisodes:
    """The episodes of all sessions. See `ClientSessions` for `post` and the threads."""

    def __init__(
        self, table: ServedEpisodes, post: Callable[[Callable[[], None]], None], limits: ServingLimits
    ) -> None:
        self._table, self._post, self._limits = table, post, limits
        self._latencies: deque[float] = deque(maxlen=_NEWEST)
        """Seconds from a step to its answer."""

    def latency_quantiles(self) -> tuple[float, float]:
        """Return the median and the 95th percentile of the newest latencies, or zeros. Another thread may call it."""
        ranked = sorted(self._latencies.copy()) or [0.0]
        return ranked[(len(ranked) - 1) // 2], ranked[math.ceil(0.95 * len(ranked)) - 1]

    def start(self, session: SessionRecord, start: EpisodeStart) -> Reply:
        """Start an episode. Raises `EpisodeError` and `ServingError`."""
        episode = session.open.get(start.episode)
        if episode is None:
            if start.episode in session.ended:
                raise over_error(start.episode, session.ended[start.episode].over)
            if len(session.open) >= self._limits.max_episodes:
                raise NoFreePlaceError(start.episode, self._limits.max_episodes)
            self._table.start(start.episode, training_enabled=start.training_enabled)
            task = self._table.task_of(start.episode)
            episode = EpisodeRecord(session, start.episode, start.training_enabled, task)
            session.open[start.episode] = episode
        elif episode.step or episode.reply_to is not None or episode.training_enabled != start.training_enabled:
            raise EpisodeError(start.episode, "already_started")
        return Reply.of(EpisodeAnswer(episode=start.episode, next_step=0, task=episode.task))

    def step(
        self, session: SessionRecord, step: AnyStep, address: Address, observation: Any, action: Any
    ) -> Reply | None:
        """Take a step, which is answered later, or return the reply to a repeated one. Raises what the table does."""
        episode = find(session, step.episode)
        if step.step == episode.step and episode.over is None and episode.reply_to is None:
            episode.reply_to, episode.asked_at = address, time.monotonic()
            self._pass_on(episode, step, observation, action)
            return None
        return self._step_again(episode, step, address, observation, action)

    def _step_again(
        self, episode: EpisodeRecord, step: AnyStep, address: Address, observation: Any, action: Any
    ) -> Reply | None:
        """Handle a step that is not new: repeated, out of order, or of an episode that is over.

        A repeated step has the kind of the first, and the action that was logged then and its observation: nothing else
        would tell the client of a lost answer what was done.
        """
        ends = step.end != "no"
        taken = episode.reply_to is not None if step.step == episode.step else step.step == episode.step - 1
        if taken and not episode.over:
            is_same_kind = (ends, not (ends or step.off_policy)) == (episode.ends, episode.wants_action)
            if not is_same_kind or bytes_of(_logged(observation, action)) != bytes_of(episode.logged):
                raise another_request_error(step.episode, step.step)
        if step.step == episode.step - 1 and episode.last is not None:
            return episode.last
        if episode.over is not None:
            raise over_error(step.episode, episode.over)
        if step.step != episode.step:
            raise ServingError(
                f"step {step.step} of episode {step.episode!r} is not the next one, which is {episode.step}",
                "step_order",
            )
        earlier, episode.reply_to = episode.reply_to, address
        if earlier is not None and earlier != address:
            detail = f"step {step.step} of episode {step.episode!r} was repeated, and the newer request gets the answer"
            earlier.send(ServingError(detail, "superseded"))
        return None

    def _pass_on(self, episode: EpisodeRecord, step: AnyStep, observation: Any, action: Any) -> None:
        """Pass a step on to the sampler, which answers later."""
        end = _ENDS[step.end]
        episode.ends = end is not ChunkEnd.ONGOING
        episode.wants_action = not (episode.ends or step.off_policy)
        episode.logged = _logged(observation, action)

        def on_answer(answer: Answer) -> None:
            self._post(lambda: self._answered(episode, answer))

        try:
            self._table.take_step(episode.id, step.news, observation, on_answer, action=action, end=end)
        except HeadraceError as error:
            episode.reply_to = None
            if code_of(error) in _GONE:
                self._end(episode, str(error))
            raise

    def abort(self, session: SessionRecord, abort: EpisodeAbort) -> None:
        """Abort an episode at its client's request. Raises `EpisodeError`."""
        episode = find(session, abort.episode)
        if episode.over == "":
            raise EpisodeError(abort.episode, "already_completed")
        if episode.over is None:
            reason = abort.reason or CLIENT_LEFT
            self.give_up(episode, reason)
            self._end(episode, reason)

    def _answered(self, episode: EpisodeRecord, answer: Answer) -> None:
        """Reply to the step under way with the sampler's answer."""
        address, episode.reply_to = episode.reply_to, None
        if address is None or episode.over is not None:
            return
        self._latencies.append(time.monotonic() - episode.asked_at)
        episode.step += 1
        if answer.error is not None:
            episode.last = refusal_of(answer.error)
            self._end(episode, str(answer.error))
        else:
            episode.last = _answer(episode, answer)
            if episode.ends:
                self._end(episode, "")
        address.send(episode.last)

    def _end(self, episode: EpisodeRecord, reason: str) -> None:
        ended = episode.session.ended
        episode.over = reason
        ended[episode.id] = episode.session.open.pop(episode.id)
        if len(ended) > self._limits.remembered_episodes:
            ended.popitem(last=False)

    def give_up(self, episode: EpisodeRecord, reason: str) -> None:
        """Abort the episode in the table, and tell the client if it waits for a step."""
        with suppress(HeadraceError):  # the sampler may have aborted it already
            self._table.abort(episode.id, reason)
        address, episode.reply_to = episode.reply_to, None
        if address is not None:
            address.send(EpisodeAbortedError(episode.id, reason))


def _logged(observation: Any, action: Any) -> dict[str, Any]:
    return {} if action is None else {"observation": observation, "action": action}


def _answer(episode: EpisodeRecord, answer: Answer) -> Reply:
    """Return an `EpisodeAnswer` as a reply. Its fields were made here, so they are not checked again."""
    fields = {"episode": episode.id, "next_step": episode.step, "weights": answer.weights}
    return Reply(MessageKind.EPISODE_ANSWER, fields, answer.action if episode.wants_action else None)
