"""A second of fuzzing of each target, and a test for each bug that fuzzing has found."""

from __future__ import annotations

from dataclasses import replace

import golden_samples
import pytest
import zmq
from fuzz.learner import SPACES, batch_of
from fuzz.run import TARGETS, fuzz, read_corpus
from fuzz.worker import shipment, welcome

from headrace.learner_stub.streaming.continuity import SourceEpisodes
from headrace.learner_stub.streaming.ready_batches import ReadyBatches
from headrace.learner_stub.streaming.session import LearnerSession, StreamLimits
from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.chunks.batch import read_batch_header
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import MessageKind, decode, decode_header, encode
from headrace.schemas.messages import Ack, LearnerWelcome, Reject, Status, WorkerHello, read
from headrace.workers.envs.remote.env_messages import EnvHostWelcome
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.window import SessionLimits
from headrace.workers.serving.serving_messages import ClientHello
from support.serving.served import Served

SCHEDULES = {
    **{"broker": 1, "learner": 2, "worker": 2, "serving": 12},
    **{"teacher": 2, "raw": 6, "fleet": 2, "keyed-fleet": 2},
}
"""About a second each; a whole fleet takes half a minute. Their number is fixed: a fast machine plays no others.

Of the broker, `tests/simulation/test_book_checks.py` plays more.
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=[pytest.mark.thorough] if "fleet" in name else []) for name in TARGETS]
)
def test_no_lie_raises_an_undocumented_error_and_honest_peers_continue(target: str) -> None:
    """Play the first seeds, and the seeds that have found a bug."""
    outcome = fuzz(target, 0.0, [*range(SCHEDULES[target]), *read_corpus().get(target, [])])
    for error in outcome.findings.values():
        raise error
    assert outcome.said


# -- findings ---------------------------------------------------------------------------------------------------------


def joined_worker(batches: int) -> WorkerSession:
    session = WorkerSession(WorkerHello(fleet_id="f", token="t", slot=3, incarnation=1), SessionLimits())
    session.receive(welcome(0), 0.0)
    for seq in range(1, batches + 1):
        session.submit(shipment(seq))
    return session


LIES_OF_BATCHES = {
    "welcome": welcome(0).model_copy(update={"settled": Settled(seq=1 << 40), "credit": 9}),
    "ack of settled": Ack(slot=3, incarnation=1, settled=Settled(seq=1 << 40), credit=9),
    "ack of accepted": Ack(slot=3, incarnation=1, accepted=3, credit=9),
}


@pytest.mark.parametrize("lie", LIES_OF_BATCHES)
def test_a_worker_ignores_answers_about_batches_that_it_has_not_cut(lie: str) -> None:
    session = joined_worker(2)
    session.receive(LIES_OF_BATCHES[lie], 0.0)
    assert (session.next_seq, session.accepted, len(session.window())) == (3, 0, 2)


def test_a_settled_batch_counts_as_accepted_and_is_not_sent_again() -> None:
    """The batch left the window, and was looked up there: an IndexError, or another batch in its place."""
    session = joined_worker(3)
    session.receive(Ack(slot=3, incarnation=1, accepted=1, settled=Settled(seq=2), credit=3), 0.0)
    session.not_sent(0.0)
    sent = [out for out in session.take_outbox() if hasattr(out, "nbytes")]
    assert [out.batch.seq for out in sent] == [3]


def test_a_refusal_of_a_batch_that_was_settled_changes_nothing() -> None:
    session = joined_worker(3)
    session.receive(Ack(slot=3, incarnation=1, accepted=2, settled=Settled(seq=2), credit=3), 0.0)
    session.take_outbox()
    session.receive(Reject(code="checksum", detail="x", fatal=False, seq=1), 0.0)
    assert session.take_outbox() == []


def test_a_learner_ignores_unreadable_spaces_and_takes_the_next_spaces() -> None:
    session = LearnerSession("t", StreamLimits())
    session.receive(LearnerWelcome(fleet_id="f", epoch=1, spaces={"shared": {"observation": 1}}), 0.0)
    assert session.spaces == {}
    session.receive(Status(epoch=1, spaces=SPACES), 0.0)
    assert session.spaces == SPACES


def test_a_batch_before_any_spaces_is_dropped_as_poison() -> None:
    session = LearnerSession("t", StreamLimits())
    session.receive(LearnerWelcome(fleet_id="f", epoch=1), 0.0)
    ready, frames = ReadyBatches(session), batch_of(0, 1)
    _, header = decode_header(frames)
    session.receive_batch(read_batch_header(header), (header, frames), 0.0)
    arrival = session.take()
    assert arrival is not None
    ready.open(arrival)
    assert (len(ready), dict(ready.dropped)) == (0, {"poison": 6})


@pytest.mark.parametrize("strange", ["env", "agents", "both"])
def test_a_batch_with_impossible_envs_or_agents_is_refused_and_the_next_is_read(strange: str) -> None:
    """The batch's env index set the learner's memory: 288 GiB, or an error at the 65,537th agent."""
    batch = golden_samples.make_batch(golden_samples.SPACES["box"], ends=(0, 3, 0, 1))
    table, agents = batch.table.copy(), batch.agents
    table["env_index"][0] = {"env": (1 << 31) - 1, "both": 10_000, "agents": 0}[strange]
    if strange != "env":
        agents = [f"agent {number}" for number in range(500 if strange == "both" else 65_537)]
    episodes = SourceEpisodes()
    with pytest.raises(DecodeError, match="bad_table"):
        episodes.take(replace(batch, table=table, agents=agents))
    assert len(episodes.take(batch).batch) == len(batch)
    assert sum(map(len, episodes.end("worker_killed"))) == 2


def test_a_server_refuses_a_request_number_that_no_answer_can_carry() -> None:
    """Such a number ended the thread that serves all clients."""
    with Served() as server, zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(server.endpoint)
        hello = ClientHello(request=1, session="s", token="t").model_dump()
        answers = {(1 << 63) - 1: MessageKind.REJECT, 1 << 53: MessageKind.REJECT, 2: MessageKind.WELCOME}
        for request, kind in answers.items():
            sock.send_multipart(encode(MessageKind.HELLO, hello | {"request": request}))
            assert sock.poll(100_000)
            assert decode(sock.recv_multipart()).kind is kind


@pytest.mark.parametrize("interval_s", [0.0, 1e-300, 61.0, 1e300])
def test_an_env_host_refuses_an_absurd_interval_of_heartbeats(interval_s: float) -> None:
    """The host fell silent for ever, or sent heartbeats without a pause."""
    told = {"worker_index": 0, "num_workers": 1, "num_envs": 2, "lease_s": 30.0, "heartbeat_interval_s": interval_s}
    with pytest.raises(DecodeError, match="heartbeat_interval_s"):
        read(EnvHostWelcome, told)
