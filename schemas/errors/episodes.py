"""Errors of calls about external episodes, and the errors that stop an external env or a client of one.

    EpisodeError            `code` is its word on the wire (`PROBLEMS` has some), `episode_id` names the episode
    ├── EpisodeAbortedError     the episode was given up, for `reason`
    ├── NoFreePlaceError        as many episodes are open as there may be
    └── EpisodesClosedError     the env is over, and with it all its episodes
    EpisodeTimeoutError     a call was not answered within its deadline
    ClientLostError         the client that drove an episode is gone

Each `EpisodeError` is a ValueError, as in RLlib's `ExternalEnv`.
"""

from __future__ import annotations

from headrace.schemas.errors import EnvError, HeadraceError

PROBLEMS = {
    "unknown_episode": "was not found: it was never started here, or ended long ago; start it first",
    "already_completed": "has already completed; start another one",
    "already_started": "is already started; give each episode an id of its own, or none",
    "busy": "waits for the answer to an earlier call; make one call after the other",
    "no_action": "has no action yet that a reward could be for; get or log an action first",
    "cannot_log": "cannot have actions logged, since module_to_env has pieces between policy and env; remove them",
}
"""The fault of a call, by the error's code. Only errors that a caller may want to tell apart are classes."""


class EpisodeError(HeadraceError, ValueError):
    """A call about the episode `episode_id` cannot be done. The state of all episodes is as before the call."""

    def __init__(self, episode_id: str, code: str, problem: str = "") -> None:
        self.episode_id, self.code = episode_id, code
        super().__init__(f"episode {episode_id!r:.80} {problem or PROBLEMS[code]}")


class EpisodeAbortedError(EpisodeError):
    """The episode was given up, for `reason`; the books count its unfinished steps under a name."""

    code = "aborted"

    def __init__(self, episode_id: str, reason: str) -> None:
        self.reason = reason
        super().__init__(episode_id, self.code, f"was aborted: {reason}; start another one")


class NoFreePlaceError(EpisodeError):
    """The limit of open episodes is reached."""

    code = "no_place"

    def __init__(self, episode_id: str, capacity: int, waited_s: float | None = None) -> None:
        self.capacity = capacity
        waited = "" if waited_s is None else f" within {waited_s:g} s"
        super().__init__(
            episode_id,
            self.code,
            f"found no free place{waited}: num_envs = {capacity} episodes are open; end one, or raise it",
        )


class EpisodesClosedError(EpisodeError):
    """The env, or the worker, is over; `reason` says why."""

    code = "closed"

    def __init__(self, episode_id: str, reason: str) -> None:
        self.reason = reason
        super().__init__(episode_id, self.code, f"cannot go on: {reason}")


class EpisodeTimeoutError(HeadraceError, TimeoutError):
    """`call` was not answered within `timeout_s` seconds, so its episode was given up."""

    def __init__(self, episode_id: str, call: str, timeout_s: float) -> None:
        self.episode_id, self.call, self.timeout_s = episode_id, call, timeout_s
        super().__init__(
            f"{call} of episode {episode_id!r:.80} waited for the sampler, which did not answer within "
            f"{timeout_s:g} s; the episode was given up. Check that a runner samples and a learner trains"
        )


class ClientLostError(EnvError):
    """The client that drove the episode is gone, for `reason`."""

    def __init__(self, episode_id: str, reason: str) -> None:
        self.episode_id, self.reason = episode_id, reason
        super().__init__(f"the client of episode {episode_id!r:.80} is gone: {reason}")
