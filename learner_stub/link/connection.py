"""The shared parts of a learner's stream and publisher: one token for each process and fleet, joint pumping.

A stream of another consumer group has a token of its own, for each process, fleet and group.

To pump a connection is to receive what has arrived and to send what is due.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from headrace.learner_stub.link.time_spent import NOT_MEASURED, TimeSpent
from headrace.schemas.basics.bounds import TRAIN, Version
from headrace.schemas.basics.process_usage import crowded_cores, own_cores, torch_threads
from headrace.schemas.errors import ConfigError, FencedError, HeadraceError
from headrace.schemas.messages import LearnerWelcome, ModuleKinds, ModuleShapes, Status

log = logging.getLogger("headrace.learner")

_Place = tuple[int, str, str]
"""(process id, consumer group, endpoint)."""
_TOKENS: dict[_Place, str] = {}
_STREAMING: set[str] = set()
_NEWEST: dict[_Place, str] = {}
"""The token of the newest stream of each group to each endpoint, also once it is closed."""
_OLDER: dict[str, set[str]] = {}
"""The token of a stream that opens -> the tokens of earlier streams of this process to the same brokers."""
_REPLACED: set[str] = set()
"""The tokens of streams that a later stream of this process has replaced, and of their publishers."""
_RANKS: dict[_Place, int] = {}
"""The rank of this process, other than 0, at each endpoint."""
_WARNED_OF_THREADS: set[int] = set()
"""The process id of a process that has warned; a child by fork has its own."""
_PUMPED: weakref.WeakSet[Pumpable] = weakref.WeakSet()
_ENROLLING = threading.Lock()
"""A thread has it while it reads or changes `_PUMPED`."""


@dataclass(slots=True)
class SharedState:
    """The state that the stream and the publisher of one learner share. Another group's stream has one of its own."""

    group: str = TRAIN
    published: Sequence[Version] = ()
    """The newest version that the learner published, as each of its brokers names it."""
    weights: tuple[ModuleShapes, ModuleKinds] | None = None
    """Shapes and kinds of the weights that workers load; None while no worker has told them."""
    time_spent: TimeSpent = NOT_MEASURED
    publishes_elsewhere: bool = False
    """True if another process publishes this learner's weights."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """A thread has it while it uses sockets of this learner, and not while it waits for a message."""

    def learn_weights(self, message: LearnerWelcome | Status) -> None:
        """Note which weights workers load, if `message` tells."""
        if message.weight_shapes:
            self.weights = message.weight_shapes, message.weight_kinds


_SHARED: defaultdict[str, SharedState] = defaultdict(SharedState)


class Pumpable(Protocol):
    """A connection that must be pumped now and then."""

    token: str

    def pump(self, wait_s: float = 0.0) -> None:
        """Receive what has arrived and send what is due, without waiting."""


def _places(endpoints: Sequence[str], group: str) -> list[_Place]:
    return [(os.getpid(), group, endpoint) for endpoint in endpoints if endpoint]


def process_token(endpoints: Sequence[str], group: str = TRAIN) -> str:
    """Return the token by which the brokers at `endpoints` know this process. Stream and publisher share it.

    An endpoint that is not known yet is "".
    """
    keys = _places(endpoints, group)
    token = next((_TOKENS[key] for key in keys if key in _TOKENS), None) or os.urandom(8).hex()
    for key in keys:
        _TOKENS.setdefault(key, token)
    return token


def stream_token(endpoints: Sequence[str], group: str = TRAIN) -> str:
    """Return a stream's token: that of this process, or a new one when another stream of it and its group is open.

    The newer one wins.
    """
    keys, known = _places(endpoints, group), process_token(endpoints, group)
    token = known
    if known in _STREAMING:
        _forget_endpoints(known)
        token = process_token(endpoints, group)
    _SHARED[token].group = group
    _OLDER[token] = {known, *(_NEWEST[key] for key in keys if key in _NEWEST)} - {token}
    _NEWEST.update(dict.fromkeys(keys, token))
    _STREAMING.add(token)
    return token


def adopt_token(endpoints: Sequence[str], token: str, *, publishes_elsewhere: bool) -> None:
    """Give the next stream of this process the token of a learner, whose publisher may be in another process.

    With `publishes_elsewhere`, forget the connections that a child by fork has from its parent.
    """
    _TOKENS.update(dict.fromkeys(_places(endpoints, TRAIN), token))
    if publishes_elsewhere:
        _PUMPED.clear()
        _SHARED[token] = SharedState(publishes_elsewhere=True)


def replace_older(token: str) -> None:
    """Note that a broker has welcomed the stream with `token`, so that older ones of this process are over."""
    _REPLACED.update(_OLDER.pop(token, ()))


def refuse_copy(member: object) -> NoReturn:
    """Raise `HeadraceError` for a stream or a publisher that is to be pickled, as for another process."""
    raise HeadraceError(
        f"this {type(member).__name__} cannot be copied or sent to another process; open one in the process that uses "
        "it; for the worker processes of a DataLoader, give it a StreamDataset"
    )


def check_newest(token: str, group: str = TRAIN) -> None:
    """Raise `FencedError` if a later stream of this process has replaced the one of `group` with `token`.

    The broker says so too, but an older stream would first hand out all that it has received.
    """
    if token not in _REPLACED:
        return
    later = "a later EpisodeStream of this process has taken over from this one"
    if group != TRAIN:
        raise FencedError("fenced", f"{later} of group {group!r}; use the later one")
    raise FencedError("fenced", f"{later} and its WeightPublisher; use the later one, and open its publisher after it")


def note_rank(endpoint: str, rank: int) -> None:
    """Note that this process reads as another rank than 0, or, with `rank` 0, that it does so no longer."""
    _RANKS[os.getpid(), TRAIN, endpoint] = rank


def check_publishes(endpoints: Sequence[str]) -> None:
    """Raise `ConfigError` where this process is another rank than 0: its weights would end the lease of rank 0."""
    rank = max((_RANKS.get(place, 0) for place in _places(endpoints, TRAIN)), default=0)
    if rank:
        raise ConfigError(f"rank 0 publishes the weights, and this is rank {rank}", key="rank")


def forget_token(token: str) -> None:
    """Forget the token of a closed stream, so that the next connection to its brokers is a new learner."""
    _STREAMING.discard(token)
    _OLDER.pop(token, None)
    forget_shared(token)
    _forget_endpoints(token)


def _forget_endpoints(token: str) -> None:
    for key in [key for key, known in list(_TOKENS.items()) if known == token]:
        del _TOKENS[key]


def move_token(token: str, after: str) -> None:
    """Note that the broker of the learner with `token` is at another endpoint now.

    The endpoint before stays the learner's too: its publisher may be opened later with the same, old addresses.
    """
    _TOKENS[(os.getpid(), _SHARED[token].group, after)] = token


def pump_together(member: Pumpable) -> None:
    """Pump the other connections of the same learner too."""
    with _ENROLLING:
        others = list(_PUMPED)
    for other in others:
        if other is not member and other.token == member.token:
            other.pump()


def shared(token: str) -> SharedState:
    """Return the state of the learner with `token`."""
    return _SHARED[token]


def forget_shared(token: str) -> None:
    """Forget the state of the learner with `token` if no stream of it is open: the next fleet may be another one."""
    if token not in _STREAMING:
        _SHARED.pop(token, None)


def warn_of_threads(workers_here: int) -> None:
    """Warn once in a process if its torch threads take the cores of the workers on this host."""
    if not workers_here or os.getpid() in _WARNED_OF_THREADS:
        return
    if crowded := crowded_cores(torch_threads(), own_cores(), workers_here):
        _WARNED_OF_THREADS.add(os.getpid())
        log.warning("%s; %s", *crowded)


def enroll(member: Pumpable) -> None:
    """Let the other connections pump `member` from now on."""
    with _ENROLLING:
        _PUMPED.add(member)


def leave(member: Pumpable) -> None:
    """Undo `enroll`."""
    with _ENROLLING:
        _PUMPED.discard(member)


def now() -> float:
    """Return the time that all sessions use, in monotonic seconds."""
    return time.monotonic()
