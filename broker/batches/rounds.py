"""Rounds of synchronous sampling: with each version of the weights the workers ship a number of steps, and then wait.

    published ──▶ planned: each worker has a share ──▶ complete: every share is shipped ──▶ the next version

The learner gets the batches of a round in the order of slots and batch numbers, whatever the order of their arrival. So
a fleet with a fixed number of workers is reproducible to the bit. A worker that dies, makes no step, or only steps of
frozen modules, does not hold up the others for ever: after a while they get what is left of its share.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.batches.source import Source, StoredBatch
from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.basics.bounds import MOST_COUNT, Version
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import Skip

log = logging.getLogger(__name__)

FIRST_WAIT_S = 60.0
"""Seconds that the first round waits for workers that the config starts and that have not connected yet."""

LATE_LEASES = 3
"""Number of lease times that a round waits for a worker that is connected but takes no step of a trained module."""

_ONLY_FROZEN = " (no step is of learner.policies_to_train)"

_SAY_WAITING_S = 10.0


@dataclass(slots=True)
class _Share:
    """One slot's share of a round: the steps to ship, and those already shipped."""

    steps: int
    shipped: dict[int, int] = field(default_factory=dict)
    seen: tuple[int, int] = (0, 0)
    """`_made` by the slot's worker at `seen_at`."""
    seen_at: float = 0.0
    """Time at which the worker last got steps to ship, took one, or waited for its window."""
    is_frozen: bool = False
    """True if its worker has taken steps, all of them of frozen modules."""

    @property
    def left(self) -> int:
        return max(0, self.steps - sum(self.shipped.values()))


class Rounds(BrokerObserver):
    """The present round of synchronous sampling.

    - configured: True if the config asks for synchronous sampling; else a learner may ask for it.
    - workers: number of workers that the config starts.
    - max_env_steps: number of env steps of the fleet after which no round begins; None: no bound.
    """

    def __init__(self, configured: bool, workers: int, lease_s: float, max_env_steps: int | None = None) -> None:
        self.known: bool | None = configured or None
        """True for synchronous sampling, False without; None until the config or a learner has decided it."""
        self.version: Version = (0, 0)
        self._configured = configured
        self._workers = workers
        self.max_env_steps = math.inf if max_env_steps is None else max_env_steps
        self._lease_s = lease_s
        self._steps = 0
        """Steps of a round; 0 for one cut of each worker."""
        self._shares: dict[int, _Share] = {}
        """Shares by slot; empty until the round is planned."""
        self._first_open: int | None = None
        """The lowest slot whose share is not complete."""
        self._elsewhere: dict[tuple[int, int], int] = {}
        self._members: dict[int, float] = {}
        """Slot -> time at which its worker was last ready."""
        self._late: dict[int, int] = {}
        """Slot -> its worker's env steps when the round stopped waiting for it."""
        self._began: float | None = None
        self._say_at = 0.0

    def ask(self, synchronous: bool, steps: int) -> None:
        """Note what a learner's stream asks for: rounds of `steps`, 0 for one cut of each worker."""
        self.known, self._steps = self._configured or synchronous, steps

    @property
    def active(self) -> bool:
        """Return whether sampling is synchronous, as far as is known."""
        return bool(self.known)

    # -- the course of a round ----------------------------------------------------------------------------------------

    def advance(self, version: Version, live: Iterable[Source], made: int, now: float) -> bool:
        """Begin the round of `version`, plan it, or pass on the share of a worker that is lost.

        `live` are the sources with a connection, `made` the env steps of all sources. Returns True if it has given
        shares, which workers must be told.
        """
        if not self.active or version == (0, 0):
            return False
        if version != self.version:
            self.version, self._shares, self._first_open, self._say_at = version, {}, None, now + _SAY_WAITING_S
        live = list(live)
        ready = {source.slot: source for source in sorted(live, key=lambda s: s.slot) if source.introduced}
        self._members.update(dict.fromkeys(ready, now))
        if self._shares:
            return self._pass_on_lost_shares(ready, now)
        if made >= self.max_env_steps:
            return False
        if self._began is None:
            self._began = now
        awaited = self._awaited(live, ready, now)
        self._say_waiting(awaited, now)
        if awaited or not ready:
            return False
        punctual = {slot: source for slot, source in ready.items() if not self._is_late(source)}
        self._plan(punctual or ready, made, now)
        return True

    def _plan(self, ready: dict[int, Source], made: int, now: float) -> None:
        steps = self._steps or sum(source.cut_steps for source in ready.values())
        for slot, share in _divide(steps, ready).items():
            self._shares[slot] = _Share(share, seen=_made(ready[slot]), seen_at=now)
        # Frozen for the round: what others have made meanwhile depends on timing, and a module's schedule may use it.
        self._elsewhere = {source.key: min(made - source.counted, MOST_COUNT) for source in ready.values()}
        self._find_first_open()

    def _awaited(self, live: list[Source], ready: dict[int, Source], now: float) -> str:
        """Return which workers the plan waits for, in words; "" for none.

        These workers build their envs, restart, or have not connected although the config starts them.
        """
        assert self._began is not None
        building = {source.slot for source in live if not source.introduced}
        restarting = {slot for slot, seen in self._members.items() if slot not in ready and now - seen < self._lease_s}
        missing = self._workers - len(ready.keys() | building | restarting)
        named = sorted(building | restarting)
        if missing > 0 and now - self._began < FIRST_WAIT_S and len(self._members) < self._workers:
            return f"{missing} of {self._workers} workers to connect"
        return f"worker {', '.join(map(str, named))} to be ready" if named else ""

    def ended(self, source: Source) -> None:
        """Note that a worker left for good, so that no plan waits for it."""
        if source.end_reason == Discard.SHUTDOWN:
            self._members.pop(source.slot, None)

    def accepted(self, source: Source, held: StoredBatch, told: BatchHeader | Skip) -> None:
        """Count an accepted batch.

        A batch that was dropped before does not count: the worker ships another in its place.
        """
        if self.known and held.weights == self.version and source.slot in self._shares:
            shipped = self._shares[source.slot].shipped
            self._count(source, shipped.get(source.incarnation, 0) + held.steps)

    def learn(self, source: Source, version: Version, shipped: int) -> None:
        """Take over how many steps a worker says it has shipped with `version`: an earlier broker may have had them."""
        if self.active and version == self.version and source.slot in self._shares:
            share = self._shares[source.slot]
            self._count(source, max(min(shipped, share.steps), share.shipped.get(source.incarnation, 0)))

    def _count(self, source: Source, shipped: int) -> None:
        self._shares[source.slot].shipped[source.incarnation] = shipped
        self._late.pop(source.slot, None)
        self._find_first_open()

    def _find_first_open(self) -> None:
        self._first_open = min((slot for slot, share in self._shares.items() if share.left), default=None)

    # -- workers that are lost ----------------------------------------------------------------------------------------

    def _pass_on_lost_shares(self, ready: dict[int, Source], now: float) -> bool:
        """Give the shares of lost workers to others. Return whether any was given."""
        lost = [slot for slot, share in self._shares.items() if share.left and self._is_lost(slot, share, ready, now)]
        if self._first_open is not None:
            self._say_waiting(self.waiting_for(), now)
        others = {slot: source for slot, source in ready.items() if slot not in lost and not self._is_late(source)}
        if not lost or not others:
            return False
        rest = sum(self._shares[slot].left for slot in lost)
        log.warning("synchronous sampling: %d steps of %s go to other workers", rest, _named(lost))
        for slot in lost:
            self._shares[slot].steps -= self._shares[slot].left
            if slot in ready:
                self._late[slot] = ready[slot].steps
        for slot, steps in _divide(rest, others).items():
            share = self._shares.setdefault(slot, _Share(0))
            share.steps, share.seen, share.seen_at = share.steps + steps, _made(ready[slot]), now
        self._find_first_open()
        return True

    def _is_lost(self, slot: int, share: _Share, ready: dict[int, Source], now: float) -> bool:
        source = ready.get(slot)
        if source is None:
            return now - self._members.get(slot, -self._lease_s) >= self._lease_s
        made = _made(source)
        if made > share.seen or source.blocked in ("window", "group"):
            share.seen, share.seen_at = made, now
        share.is_frozen = Discard.FROZEN in source.totals.discarded and not source.totals.shipped
        return now - share.seen_at > LATE_LEASES * self._lease_s

    def _is_late(self, source: Source) -> bool:
        return self._late.get(source.slot) == source.steps

    # -- what others ask ----------------------------------------------------------------------------------------------

    def share(self, source: Source) -> int:
        """Return how many steps this life of a worker must ship with this round's weights.

        Earlier lives may have shipped a part of the slot's share.
        """
        share = self._shares.get(source.slot)
        return 0 if share is None else share.left + share.shipped.get(source.incarnation, 0)

    def steps_elsewhere(self, source: Source, made: int) -> int:
        """Return the env steps of all other lives: at the time of the round's plan, or now if there are no rounds."""
        now = min(made - source.counted, MOST_COUNT)
        return self._elsewhere.get(source.key, now) if self.active else now

    @property
    def stage(self) -> tuple[bool, Version, int]:
        """Return a value that changes whenever the result of `has` may change for a batch."""
        return self.active, self.version, len(self._shares)

    def has(self, source: Source, held: StoredBatch) -> bool:
        """Return whether a batch is of this round. End markers have no version of their own."""
        if not self.active:
            return False
        return held.weights in (self.version, (self.version[0], 0)) and source.slot in self._shares

    def is_turn(self, slot: int) -> bool:
        """Return whether the learner may get batches of this slot: the shares of all lower slots are complete."""
        return self._first_open is None or slot <= self._first_open

    def waiting_for(self) -> str:
        """Return the peers that a worker with a complete share waits for: other workers, or the learner."""
        open_ = [slot for slot, share in self._shares.items() if share.left]
        only_frozen = any(self._shares[slot].is_frozen for slot in open_)
        return _named(open_) + (_ONLY_FROZEN if only_frozen else "") if open_ else "learner"

    def _say_waiting(self, whom: str, now: float) -> None:
        if whom and now >= self._say_at:
            self._say_at = now + _SAY_WAITING_S
            log.info("synchronous sampling, round of weights %s: waiting for %s", self.version, whom)


def _made(source: Source) -> tuple[int, int]:
    """Return (incarnation, agent steps without those of frozen modules), which rises while a worker can fill a share.

    Frozen steps count as such once they are cut, so the number may also fall back.
    """
    return source.incarnation, source.totals.stepped - source.totals.discarded.get(Discard.FROZEN, 0)


def _named(slots: Iterable[int]) -> str:
    named = sorted(slots)
    return f"{'worker' if len(named) == 1 else 'workers'} {', '.join(map(str, named[:20]))}"


def _divide(steps: int, workers: dict[int, Source]) -> dict[int, int]:
    """Divide `steps` among workers in equal shares. Each is a multiple of the worker's envs, which step together."""
    shares: dict[int, int] = {}
    for place, (slot, source) in enumerate(workers.items()):
        fair = -(-steps // (len(workers) - place))
        shares[slot] = max(0, -(-fair // source.num_envs) * source.num_envs)
        steps -= shares[slot]
    return shares
