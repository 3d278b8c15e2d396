"""The charges for messages at the broker's ports. A peer pays for those that bring nothing new.

Each known peer has a budget (`PeerAccount.idle`). An honest one never empties it. `PortWatch` ends the connection of a
peer that does. docs/internals/port-bounds.md has a table of what each message costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.broker.batches.source import Peer
from headrace.broker.ports.weights_relay import WeightsRelay
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.basics.bounds import Version
from headrace.schemas.peers.message_budget import MessageBudget
from headrace.schemas.peers.peer_account import PeerAccount, idle_messages
from headrace.schemas.peers.port_watch import PortWatch

COST_OF_SKIP, COST_OF_REPEAT = 0.25, 0.125
"""Costs of a SKIP and of a batch that is not accepted, in addition to their bytes. After a standstill of the broker an
honest worker repeats all its window, 1,024 batches at most.
"""
_COST_OF_LIFE = 64.0
"""Cost of a HELLO that begins another life of a worker, in addition."""
_COST_OF_VERSION = 0.1
"""Cost of a new version of the weights. A learner may publish small ones as fast as it can."""
_SUPERVISOR_SHARE = 0.1
"""Part of its cost, apart from its bytes, that a supervisor pays for a message: it tells of all its workers."""
_WORKER_BYTES, _LEARNER_BYTES = 4096, 512
"""Bytes of a header that cost as much as one message. A learner's HELLO of 1 MiB with 10,000 positions takes 0.2 s. The
bytes of arrays cost nothing, since they are not parsed.
"""
_BATCH_HEADER_BYTES = 128 << 10
"""Bytes of an accepted batch's header that cost nothing. One that names a thousand aborted episodes is smaller."""
_SMALL, _LARGE_BURST, _LARGE_PER_S = 16.0, 2000, 250.0
"""A stranger's message of up to 64 KiB is always read. The costs of larger ones of all strangers: at once, and in each
second. A HELLO is larger where spaces and weights have thousands of parts.
"""


@dataclass(slots=True)
class HeardMessage:
    """A message that has come at a port, before it is handled."""

    watch: PortWatch
    fd: int
    account: PeerAccount
    peer: Peer
    header_bytes: int
    nbytes: int
    was_known: bool
    lives: int
    """Number of lives that the broker knew before."""
    weights: Version
    """The version of the weights that the broker had before."""


class Charges:
    """The charges at the ports for workers and for learners of one broker. The thread of its sockets uses them."""

    def __init__(self, core: BrokerCore, relay: WeightsRelay) -> None:
        self._core, self._relay = core, relay
        self._budgets: dict[int, MessageBudget] = {}
        """By slot, the budget of its worker, whatever the worker's connection."""
        self._supervisors: dict[str | None, MessageBudget] = {}
        """By group of keys, the budget of all its supervisors together; None without keys."""
        self._large = MessageBudget(_LARGE_BURST, _LARGE_PER_S, _LARGE_BURST)
        """The budget of all strangers at the workers' port for large messages."""

    def note(
        self, watch: PortWatch, fd: int, account: PeerAccount, peer: Peer, header_bytes: int, nbytes: int
    ) -> HeardMessage:
        """Return a message with what its handling may change. `peer` is tagged with its port."""
        lives, weights = len(self._core.sources), self._relay.version
        return HeardMessage(watch, fd, account, peer, header_bytes, nbytes, account.known, lives, weights)

    def reads_of_worker(self, heard: HeardMessage) -> bool:
        """Return whether to read a message at the workers' port. Charge one that its sender cannot pay for.

        All strangers together pay for their large messages. A stranger repeats one that is not read.
        """
        bytes_cost = heard.header_bytes / _WORKER_BYTES
        if not heard.was_known:
            if bytes_cost <= _SMALL or self._large.spend(bytes_cost):
                return True
            heard.watch.strange(heard.fd, heard.account, heard.nbytes)
            return False
        if heard.account.idle.has(bytes_cost):
            return True
        heard.watch.spoke(heard.fd, heard.account, bytes_cost)
        return False

    def charge_worker(self, heard: HeardMessage, cost: float) -> None:
        """Charge the sender of a message at the workers' port.

        `cost`: that of the message apart from its bytes; 0 for an accepted batch.
        """
        if not heard.was_known:
            self._introduce(heard)
        elif cost:
            if cost >= 1.0:  # a worker may send a thousand SKIPs or repeated batches, and larger ones after them
                heard.watch.count_unread(heard.fd, heard.account)
            workers = self._core.workers
            if heard.peer in workers.supervisors and heard.peer not in workers.peers:
                cost *= _SUPERVISOR_SHARE
            elif len(self._core.sources) > heard.lives:
                cost += _COST_OF_LIFE
            heard.watch.spoke(heard.fd, heard.account, cost + heard.header_bytes / _WORKER_BYTES)
        elif heard.header_bytes > _BATCH_HEADER_BYTES:
            cost = (heard.header_bytes - _BATCH_HEADER_BYTES) / _WORKER_BYTES
            heard.watch.spoke(heard.fd, heard.account, cost)

    def charge_learner(self, heard: HeardMessage) -> None:
        """Charge the sender of a message at the learners' port, unless it settled batches or made room for others."""
        self._introduce(heard)
        account, progress = heard.account, self._core.learners.progress
        if not (heard.was_known and account.known):
            return
        heard.watch.count_unread(heard.fd, account)
        if progress > account.progress:
            account.progress = progress
        else:
            is_version = self._relay.version > heard.weights
            cost = _COST_OF_VERSION if is_version else max(1.0, heard.header_bytes / _LEARNER_BYTES)
            heard.watch.spoke(heard.fd, account, cost)

    def charge_refusal(self, heard: HeardMessage) -> None:
        """Charge the sender of a message that was refused."""
        large = heard.header_bytes / _WORKER_BYTES if heard.account.known else 0.0
        heard.watch.refused(heard.fd, heard.account, 1.0 + large)

    def _introduce(self, heard: HeardMessage) -> None:
        """Note whether the sender is known now.

        A worker goes on with the budget that its slot has left, and a supervisor with that of its group.
        """
        account = heard.account
        account.known = self._core.knows(heard.peer)
        if not account.known:
            account.was_known |= heard.was_known
            heard.watch.strange(heard.fd, account, heard.nbytes)
        elif (source := self._core.workers.peers.get(heard.peer)) is not None:
            account.idle = self._budgets.setdefault(source.slot, account.idle)
        elif (supervisor := self._core.workers.supervisors.get(heard.peer)) is not None:
            account.idle = self._of_supervisors(supervisor.group)

    def _of_supervisors(self, group: str | None) -> MessageBudget:
        """Return the budget of a group's supervisors. It is full at first: a new one may have much to tell."""
        if group not in self._supervisors:
            budget = self._supervisors[group] = idle_messages()
            budget.left = budget.most
        return self._supervisors[group]
