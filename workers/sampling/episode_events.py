"""Calls the runner's callbacks for the episodes of a vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import CallbackError
from headrace.workers.callbacks import CallbackList
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.sampling.episode_view import AnyEpisodeView

Look = Callable[[Lane, Any], AnyEpisodeView]
"""Function that returns the view of an episode in a lane as it is now."""


class EpisodeEvents:
    """Calls back for one vector.

    While an episode goes on, a callback's error is returned, not raised, because it fails that episode. After the end
    of an episode the error is logged.
    """

    def __init__(self, callbacks: CallbackList, look: Look) -> None:
        self._callbacks = callbacks
        self._look = look
        self.watches_created = callbacks.wants("on_episode_created")
        self.watches_starts = callbacks.wants("on_episode_start")
        self.watches_steps = callbacks.wants("on_episode_step")
        self.watches_ends = self.watches_steps or callbacks.wants("on_episode_end")
        self.watches_failures = callbacks.wants("on_env_failed") or callbacks.wants("on_episode_aborted")

    def created(self, lane: Lane, episode: Episode) -> None:
        """Report that the lane's env is about to be reset. Raises `CallbackError`."""
        self._call("on_episode_created", lane, self._look(lane, episode))

    def started(self, lane: Lane, episode: Episode) -> CallbackError | None:
        """Report that the lane's env was reset. Return a callback's error, or None."""
        try:
            self._call("on_episode_start", lane, self._look(lane, episode))
        except CallbackError as error:
            return error
        return None

    def stepped(self, lane: Lane, episode: Episode, end: ChunkEnd) -> CallbackError | None:
        """Report that the lane's env was stepped, and its `end` unless ONGOING. Return a callback's error, or None."""
        try:
            view = self._look(lane, episode)
            if end is not ChunkEnd.ONGOING:
                view = view.ended(end)
            if self.watches_steps:
                self._call("on_episode_step", lane, view)
            if end is not ChunkEnd.ONGOING:
                self._call("on_episode_end", lane, view)
        except CallbackError as error:
            return error
        return None

    def aborted(self, view: AnyEpisodeView, reason: Discard) -> None:
        """Report that the episode will never finish."""
        self._callbacks.tell("on_episode_aborted", episode=view, reason=reason.value, env_index=view.env_index)

    def failed(self, lane: Lane, failure: Failure) -> None:
        """Report that the lane is about to be rebuilt. An episode that was created but not reset is aborted."""
        view = failure.view
        if failure.unbegun is not None:
            view = self._look(lane, failure.unbegun)
            self.aborted(view, failure.reason)
        if not isinstance(failure.error, CallbackError):
            self._callbacks.tell("on_env_failed", exc=failure.error, episode=view, env_index=lane.index)

    def _call(self, event: str, lane: Lane, view: AnyEpisodeView) -> None:
        env = getattr(lane.env, "unwrapped", lane.env)
        self._callbacks.call(event, episode=view, env=env, env_index=lane.index)
