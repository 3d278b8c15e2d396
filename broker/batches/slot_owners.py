"""Owners of slots, which are groups of keys, and the rights of a peer by the key that it has shown.

A slot belongs to the group whose key took it first, for as long as the fleet's run directory lives. Only workers of
that group may join there, and only its supervisors may tell of a death there. So the holder of one group's keys cannot
harm the slots of another, whether these live, are silent for a while, or wait for a restarted broker. The slots of the
workers that the fleet starts itself belong to the fleet's own group, even before these workers join. A slot that such a
worker has joined stays with that group when the run goes on with fewer workers.

Without keys there are no groups, and every peer may have every slot. Of several brokers each has its own slots.
"""

from __future__ import annotations

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.schemas.credentials.key_files import PeerKey
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages import GroupHello, LearnerHello, Message, RankHello, SupervisorHello, WorkerHello

OTHER_GROUP = "other_group"


class SlotOwners:
    """The owners of the slots of one fleet. `state` has those that have joined; it outlives the broker."""

    def __init__(self, limits: BrokerLimits, state: BrokerState) -> None:
        self.own_group = limits.group
        """The group of the fleet's own workers and supervisor."""
        self._own_slots = range(limits.workers)
        self._brokers, self._index = limits.brokers, limits.index
        self._state = state

    def owner(self, slot: int) -> str | None:
        """Return the group that has a slot; None for a slot that no worker with a key has taken."""
        return self.own_group if slot in self._own_slots else self._state.owners.get(slot)

    def may_join(self, slot: int, group: str | None) -> bool:
        """Return whether a worker of a group may have a slot. None: no keys are in use."""
        return group is None or self.owner(slot) in (None, group)

    def may_tell_of(self, slot: int, group: str | None) -> bool:
        """Return whether a group's supervisor may report deaths in a slot; in an unowned slot only the fleet's own."""
        return group is None or group == (self.own_group if (owner := self.owner(slot)) is None else owner)

    def take(self, slot: int, group: str | None) -> None:
        """Note that a worker of this group has joined in a slot. The caller has checked `may_join`."""
        if group is not None:
            self._state.owners[slot] = group

    def judge(self, hello: Message, key: PeerKey | None) -> None:
        """Raise `DecodeError` for a HELLO of another role than its key, or for a slot that the peer may not have."""
        if key is not None and isinstance(hello, WorkerHello | LearnerHello | RankHello | SupervisorHello):
            if key.revoked:
                raise DecodeError(*revocation(key))
            role = "learner" if isinstance(hello, GroupHello | RankHello) else hello.role
            if key.role != role:
                detail = f"this peer says that it is a {role}, with the key of a {key.role}"
                raise DecodeError("wrong_role", detail)
        if isinstance(hello, WorkerHello) and hello.slot is not None:
            self._judge_slot(hello.slot, key.group if key is not None else None)

    def _judge_slot(self, slot: int, group: str | None) -> None:
        if slot % self._brokers != self._index:
            detail = (
                f"slot {slot} belongs to broker {slot % self._brokers} of {self._brokers}, and this is broker "
                f"{self._index}; give workers, learner and brokers the same broker.count"
            )
            raise DecodeError("other_broker", detail)
        if not self.may_join(slot, group):
            detail = f"slot {slot} belongs to workers {of_group(self.owner(slot))}; name another slot, or none"
            raise DecodeError(OTHER_GROUP, detail)


def of_group(group: str | None) -> str:
    """Return "of group gpu" or "of the default group", for people."""
    return f"of group {group}" if group else "of the default group"


def revocation(key: PeerKey) -> tuple[str, str]:
    """Return code and sentence for a peer whose key is revoked."""
    name, role = (f"{key.name} key", key.role) if key.role else ("key", "ROLE")
    group = f" --group {key.group}" if key.group else ""
    advice = f"ask the person who runs the broker for another key (headrace keys add {role}{group}), and start again"
    return "key_revoked", f"the {name} {key.public[:8].decode()}... of this peer is revoked; it must stop; {advice}"
