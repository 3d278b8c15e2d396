"""The rights of a peer at HELLO: the role of the key that it has shown, and the slots of this broker.

Without keys every peer may have every role. Of several brokers each has its own slots.
"""

from __future__ import annotations

from headrace.broker.batches.limits import BrokerLimits
from headrace.schemas.credentials.key_files import PeerKey
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages import GroupHello, LearnerHello, Message, RankHello, SupervisorHello, WorkerHello


def judge_hello(hello: Message, key: PeerKey | None, limits: BrokerLimits) -> None:
    """Raise `DecodeError` for a HELLO of another role than its key, or for a slot of another broker."""
    if key is not None and isinstance(hello, WorkerHello | LearnerHello | RankHello | SupervisorHello):
        if key.revoked:
            raise DecodeError(*revocation(key))
        role = "learner" if isinstance(hello, GroupHello | RankHello) else hello.role
        if key.role != role:
            detail = f"this peer says that it is a {role}, with the key of a {key.role}"
            raise DecodeError("wrong_role", detail)
    slot = hello.slot if isinstance(hello, WorkerHello) else None
    if slot is not None and slot % limits.brokers != limits.index:
        detail = (
            f"slot {slot} belongs to broker {slot % limits.brokers} of {limits.brokers}, and this is broker "
            f"{limits.index}; give workers, learner and brokers the same broker.count"
        )
        raise DecodeError("other_broker", detail)


def revocation(key: PeerKey) -> tuple[str, str]:
    """Return code and sentence for a peer whose key is revoked."""
    name, role = (f"{key.name} key", key.role) if key.role else ("key", "ROLE")
    group = f" --group {key.group}" if key.group else ""
    advice = f"ask the person who runs the broker for another key (headrace keys add {role}{group}), and start again"
    return "key_revoked", f"the {name} {key.public[:8].decode()}... of this peer is revoked; it must stop; {advice}"
