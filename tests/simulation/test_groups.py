"""Two groups of keys at one broker: a hostile peer of one group changes nothing of the other.

Each case plays twice: once with the hostile messages, and once without them. What the honest group and the learner see
of the honest group's slots must be the same, message by message, and so must its books.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.files.state_file import BrokerFile, Endpoints
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.credentials.key_files import PeerKey
from headrace.schemas.messages import (
    Bye,
    Commit,
    Fenced,
    Heartbeat,
    LearnerHello,
    Message,
    Obituary,
    Reject,
    Skip,
    SourceEnd,
    SourcePosition,
    SupervisorHello,
    WeightsRefusal,
    WorkerHello,
    WorkerWelcome,
)
from support.simulation.even_batches import settled, totals, window

FLEET, LEASE_S = "fleet", 10.0
SPACES = {"observation": {"kind": "discrete", "n": 2}, "action": {"kind": "discrete", "n": 2}}
SHAPES = {"default_policy": {"w": [2]}}
HONEST, LEARNER, SUPERVISOR = {0: b"wa0", 1000: b"wa1"}, b"l", b"wsa"
"""Connections. Slot 0 is one that the fleet starts itself; 1000 was given to an honest worker from elsewhere."""
HOSTILE_WORKER, HOSTILE_SUPERVISOR = b"wb", b"wsb"
GROUP = "gpu"


def key(role: str, group: str = "") -> PeerKey:
    return PeerKey(role, group, f"{role}.{group}".encode())


class Worker:
    """An honest worker: what it has cut, and what it heard of that."""

    def __init__(self, slot: int, incarnation: int = 0) -> None:
        self.slot, self.incarnation, self.seq, self.settled = slot, incarnation, 0, 0

    def hello(self) -> WorkerHello:
        named = {"slot": self.slot, "incarnation": self.incarnation} if self.incarnation or not self.slot else {}
        return WorkerHello(
            fleet_id=FLEET,
            token=f"secret {self.slot} {self.incarnation}",
            spaces=SPACES,
            weight_shapes=SHAPES,
            totals=totals(self.seq),
            settled=settled(self.settled),
            **named,
        )


class Honest:
    """A broker and its honest peers. `seen` is what they and the learner heard of the honest slots."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limits = BrokerLimits(lease_s=LEASE_S, workers=1)
        self.core = BrokerCore(FLEET, self.limits)
        self.workers = {slot: Worker(slot) for slot in HONEST}
        self.deaths: list[Obituary] = []
        self.learned: dict[tuple[int, int], int] = {}
        self.seen: list[object] = []
        self.say(LEARNER, LearnerHello(token="l", channel="stream", window_batches=1 << 20))
        for slot in HONEST:
            self.join(slot)

    def say(self, peer: bytes, message: Message, who: PeerKey | None = None) -> list[Any]:
        """Say it, let the honest peers read their answers, and return those of this peer."""
        if isinstance(message, WorkerHello | SupervisorHello | LearnerHello):
            own = "learner" if peer == LEARNER else message.role
            self.core.receive(peer, message, self.now, who or key(own))
        else:
            self.core.receive(peer, message, self.now)
        return self.read(peer)

    def ship(self, peer: bytes, slot: int, incarnation: int, seq: int) -> bool:
        header = BatchHeader(
            fleet_id=FLEET, slot=slot, incarnation=incarnation, seq=seq, steps=10, chunks=2, totals=totals(seq)
        )
        frames: list[Any] = [orjson.dumps([slot, incarnation, seq])]
        accepted = self.core.receive_batch(peer, header, frames, 1000, self.now)
        self.read(peer)
        return accepted

    def read(self, peer: bytes) -> list[Any]:
        """Take the outbox: note what is of honest slots, and do what honest peers do about it."""
        answers, again = [], []
        for send in self.core.take_outbox():
            if send.peer == peer:
                answers.append(send.content)
            if send.peer == LEARNER:
                self.learn(send.content)
            for slot, own in HONEST.items():
                if send.peer == own and isinstance(send.content, Reject | Fenced | WorkerWelcome):
                    again.append((slot, send.content))
        for slot, content in again:
            self.hear(slot, content)
        return answers

    def learn(self, content: Any) -> None:
        if isinstance(content, list):
            slot, incarnation, seq = orjson.loads(content[0])
            self.learned[slot, incarnation] = seq
            self.note_of(slot, ("batch", slot, incarnation, seq))
        elif isinstance(content, Reject | Fenced):
            self.seen.append(content)
        elif isinstance(content, SourceEnd):
            self.note_of(content.slot, content)

    def note_of(self, slot: int, what: object) -> None:
        if slot in HONEST:
            self.seen.append(what)

    def hear(self, slot: int, content: Reject | Fenced | WorkerWelcome) -> None:
        worker = self.workers[slot]
        if isinstance(content, WorkerWelcome):
            assert content.slot == slot
            worker.incarnation, worker.settled = content.incarnation, content.settled.seq
            for seq in range(content.accepted + 1, worker.seq + 1):
                self.ship(HONEST[slot], slot, worker.incarnation, seq)
        elif isinstance(content, Reject) and not content.fatal and not content.seq:
            self.say(HONEST[slot], worker.hello())
        else:
            self.seen.append((slot, content))

    # -- what honest peers do -----------------------------------------------------------------------------------------

    def join(self, slot: int) -> None:
        self.say(HONEST[slot], self.workers[slot].hello())

    def work(self, slot: int) -> None:
        worker = self.workers[slot]
        worker.seq += 1
        self.ship(HONEST[slot], slot, worker.incarnation, worker.seq)

    def beat(self, slot: int) -> None:
        worker = self.workers[slot]
        counters: Any = {"episodes": {"default_policy": worker.seq}}
        beat = Heartbeat(slot=slot, incarnation=worker.incarnation, totals=totals(worker.seq), counters=counters)
        self.say(HONEST[slot], beat)

    def die(self, slot: int) -> None:
        """A worker is killed: its supervisor tells so, and starts the next."""
        worker = self.workers[slot]
        told = {"totals": totals(worker.seq), "settled": settled(worker.settled)}
        left = window(worker.settled + 1, worker.seq)
        self.deaths.append(
            Obituary(slot=slot, incarnation=worker.incarnation, window=left, reason="worker_killed", **told)
        )
        self.tell_of_deaths()
        self.workers[slot] = Worker(slot, worker.incarnation + 1)
        self.join(slot)

    def tell_of_deaths(self) -> None:
        for death in self.deaths:
            self.say(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"))
            self.say(SUPERVISOR, death)

    def commit(self) -> None:
        position = [SourcePosition(slot=s, incarnation=i, settled=settled(seq)) for (s, i), seq in self.learned.items()]
        self.say(LEARNER, Commit(epoch=1, position=position))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.read(b"")

    def restart(self) -> None:
        """The broker is killed. The next one has what stands in broker.json, and the learner comes first."""
        file = BrokerFile(
            pid=1,
            fleet_id=FLEET,
            endpoints=Endpoints(worker="w", learner="l", weights="v"),
            epoch=self.core.state.epoch,
            learner_token=self.core.state.learner_token,
            incarnations=self.core.state.incarnations,
            owners=self.core.state.owners,
        )
        state = BrokerFile.model_validate(orjson.loads(file.model_dump_json())).state()
        self.core = BrokerCore(FLEET, self.limits, state, self.now)
        position = [SourcePosition(slot=s, incarnation=i, settled=settled(seq)) for (s, i), seq in self.learned.items()]
        hello = LearnerHello(token="l", channel="stream", window_batches=1 << 20, epoch=1, position=position)
        self.say(LEARNER, hello)
        self.tell_of_deaths()

    def books(self) -> object:
        """All that this broker holds of the honest slots."""
        rows = [row for row in self.core.rows() if row.slot in HONEST]
        live = sorted(source.key for source in self.core.live() if source.slot in HONEST)
        state = self.core.state
        known = [
            {slot: value for slot, value in values.items() if slot in HONEST}
            for values in (state.incarnations, state.owners, state.counters)
        ]
        bound = self.core.store.max_env_steps
        return (sorted(rows, key=lambda row: (row.slot, row.incarnation)), live, known, self.core.workers.spaces, bound)


Lie = dict[str, Any]
Step = tuple[str, Any, list[Lie]]
"""(act of the honest peers, its argument, lies that the hostile ones tell right after)."""

LIES = st.fixed_dictionaries(
    {
        "what": st.sampled_from(
            ["hello", "elsewhere", "obituary", "bye", "beat", "skip", "batch", "supervise", "drain", "refuse"]
        ),
        "slot": st.sampled_from([0, 1000, 1000, 1001]),
        "life": st.sampled_from([-1, 0, 0, 1]),
        "further": st.integers(0, 2),
        "is_worker": st.booleans(),
        "has_its_key": st.sampled_from([True, True, True, False]),
    }
)
DONE = st.one_of(
    st.tuples(st.sampled_from(["work", "work", "beat", "die"]), st.sampled_from(sorted(HONEST))),
    st.tuples(st.sampled_from(["commit", "restart", "restart"]), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.5, LEASE_S + 1])),
)
STEPS = st.lists(st.builds(lambda done, lies: (*done, lies), DONE, st.lists(LIES, max_size=4)), max_size=12)


def attack(world: Honest, lie: Lie) -> None:
    """A peer with a key of the other group says what it likes on its own connection, knowing all but tokens."""
    slot, what = lie["slot"], lie["what"]
    victim = world.workers.get(slot, Worker(slot, 1))
    incarnation, seq = max(1, victim.incarnation + lie["life"]), victim.seq + lie["further"]
    is_worker = lie["is_worker"] if what in ("obituary", "bye") else what not in ("supervise", "drain")
    peer, role = (HOSTILE_WORKER, "worker") if is_worker else (HOSTILE_SUPERVISOR, "supervisor")
    shown = key(role if lie["has_its_key"] else "learner", GROUP)
    place = {"slot": slot, "incarnation": incarnation}
    last = {"totals": totals(seq), "settled": settled(victim.settled), "window": window(victim.settled + 1, seq)}
    counters: Any = {"episodes": {"default_policy": 1000}}
    refused = WeightsRefusal(version=(1, 9), slot=slot, detail="no")
    messages: dict[str, Callable[[], Message]] = {
        "hello": lambda: WorkerHello(
            fleet_id=FLEET, token="x", **place, totals=totals(seq), settled=settled(victim.settled), spaces=SPACES
        ),
        "elsewhere": lambda: WorkerHello(
            fleet_id=FLEET, token="y", spaces=SPACES, weight_shapes={"m": {"x": [lie["further"]]}}
        ),
        "obituary": lambda: Obituary(**place, **last, reason="worker_killed"),
        "bye": lambda: Bye(**place, **last, counters=counters),
        "beat": lambda: Heartbeat(**place, totals=totals(seq), counters=counters),
        "skip": lambda: Skip(**place, batch=window(seq, seq)[0], reason="poison", totals=totals(seq)),
        "supervise": lambda: SupervisorHello(fleet_id=FLEET, token="z"),
        "drain": lambda: SupervisorHello(fleet_id=FLEET, token="z", draining=True),
        "refuse": lambda: Heartbeat(slot=1001, incarnation=1, totals=totals(0), refused=refused),
    }
    if what == "batch":
        world.ship(peer, slot, incarnation, seq)
        return
    if what == "obituary" and not is_worker:
        world.say(peer, messages["supervise"](), shown)
    if what == "skip" and not seq:
        return
    answers = world.say(peer, messages[what](), shown)
    welcome = next((answer for answer in answers if isinstance(answer, WorkerWelcome)), None)
    assert welcome is None or (welcome.slot not in HONEST and shown.role == "worker")


def play(steps: list[Step], *, hostile: bool) -> Honest:
    world = Honest()
    for what, argument, lies in steps:
        getattr(world, what)(*([] if argument is None else [argument]))
        for lie in lies if hostile else []:
            attack(world, lie)
    for slot in HONEST:  # whatever was said, all goes on
        world.work(slot)
        world.beat(slot)
    world.commit()
    world.wait(1.0)
    return world


@settings(max_examples=150, derandomize=True)
@given(STEPS)
def test_a_hostile_peer_of_one_group_changes_nothing_of_another(steps: list[Step]) -> None:
    quiet, noisy = play(steps, hostile=False), play(steps, hostile=True)
    assert noisy.books() == quiet.books()
    assert noisy.seen == quiet.seen
    assert not any(isinstance(what, Reject | Fenced) for what in noisy.seen)


def test_a_peer_with_a_revoked_key_is_rejected_and_its_batches_are_refused() -> None:
    world = Honest()
    world.core.expel(HONEST[1000], "key_revoked", "revoked")
    sends = world.core.take_outbox()
    assert [(send.peer, send.content.code) for send in sends if isinstance(send.content, Reject)] == [
        (HONEST[1000], "key_revoked")
    ]
    assert not world.ship(HONEST[1000], 1000, 1, 1)


def test_a_smaller_fleet_gives_its_old_slots_to_no_worker_of_another_group() -> None:
    """The run goes on with fewer workers. The dead lives of the others still are of the fleet's own group."""
    state = BrokerState()
    hello = WorkerHello(fleet_id=FLEET, token="own", slot=1, incarnation=1, spaces=SPACES)
    BrokerCore(FLEET, BrokerLimits(workers=2), state).receive(b"wa", hello, 0.0, key("worker"))
    core = BrokerCore(FLEET, BrokerLimits(workers=1), state)
    core.receive(b"wb", hello.model_copy(update={"token": "x"}), 0.0, key("worker", GROUP))
    assert [getattr(send.content, "code", "") for send in core.take_outbox()] == ["other_group"]
