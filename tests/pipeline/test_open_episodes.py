"""Each episode that a dead worker left open gets its end marker, also at a learner that goes on from a checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.streaming.continuity import SourceEpisodes
from headrace.learner_stub.streaming.session import LearnerSession, StreamLimits
from headrace.learner_stub.streaming.source_progress import by_broker
from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.open_episodes import OpenEpisodes
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages import LearnerWelcome, Obituary, SourceEnd, SourcePosition, SupervisorHello
from support.pipeline.delivery import (
    FLEET,
    SPACES,
    BrokerThread,
    Envs,
    Feeder,
    RawPeer,
    StartBroker,
    StartFeeder,
    Witness,
)
from support.waiting import TIMEOUT_S, wait_until

MODULES = {"default_policy": SPACES}
Left = set[tuple[str, int, int]]
"""(episode, chunks, env step) of each open episode."""


def _left(batches: list[ChunkBatch]) -> Left:
    """Return the episodes that a learner with only these batches would abort."""
    witness = Witness()
    for batch in batches:
        witness.see(batch)
    last = [witness._last[name] for name in witness.open_episodes()]
    return {(chunk.episode_id, chunk.chunk_index + 1, chunk.t_start + len(chunk)) for chunk in last}


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 4),
    missing=st.sets(st.integers(0, 19)),
    resumes=st.sets(st.integers(1, 19), max_size=4),
    opened=st.sets(st.integers(1, 19)),
    between=st.sets(st.integers(1, 19)),
)
def test_a_learner_that_goes_on_from_its_checkpoint_ends_each_episode_once(
    seed: int, width: int, missing: set[int], resumes: set[int], opened: set[int], between: set[int]
) -> None:
    """A batch may be missing right after the checkpoint, or before it: what it broke stays broken.

    opened: batches that have been read, and not handed out, when a checkpoint is made. They come again.
    between: batches before which a checkpoint is made once their markers were handed out.
    """

    def go_on() -> SourceEpisodes:
        told = episodes.still_open()
        before = told and OpenEpisodes.model_validate_json(told.model_dump_json())
        return SourceEpisodes(before=before, gap_reason=episodes.gap_reason)

    batches = Envs(seed, width, fails=0.1).fragments(20)
    episodes, witness = SourceEpisodes(), Witness()
    for number, batch in enumerate(batches):
        if number in resumes:
            if number in opened - missing:
                episodes.take(batch)
            episodes = go_on()
        if number in missing:
            episodes.gap_reason = "overflow"
            continue
        parts = episodes.take(batch).parts
        if number in between and len(parts) == 2:
            witness.see(parts[0])
            episodes.note_handed_out()
            episodes = go_on()
            parts = episodes.take(batch).parts
        for part in parts:
            witness.see(part)
            episodes.note_handed_out()
    episodes.learn(SourceEnd(slot=0, incarnation=1, seq=20, reason="worker_killed"), MODULES)
    for markers in episodes.end("worker_killed"):
        witness.see(markers)
    assert not witness.open_episodes()


def _die(feeder: Feeder, broker: BrokerThread) -> None:
    """End a worker without a word, and let a supervisor tell the broker what it left."""
    feeder.stop()
    obituary = Obituary(
        slot=0,
        incarnation=1,
        totals=feeder.totals,
        settled=feeder.session.settled,
        window=feeder.session.window(),
        reason="worker_killed",
    )
    with RawPeer(broker.endpoints.worker) as supervisor:
        supervisor.send(SupervisorHello(fleet_id=FLEET, token="s").frames())
        supervisor.send(obituary.frames())
        wait_until(lambda: (row := broker.rows().get((0, 1))) and row.closed, "the closed books")


def _markers(stream: EpisodeStream) -> Left:
    batch = stream.next(TIMEOUT_S)
    assert batch is not None
    assert batch.arrays.keys() == {"obs", "actions", "rewards", "weights_seq"}
    assert {chunk.end_reason for chunk in batch} == {"worker_killed"}
    assert {chunk.agent_id for chunk in batch} == {"default_agent"}
    return {(chunk.episode_id, chunk.chunk_index, chunk.t_start) for chunk in batch}


def test_later_learners_get_a_dead_workers_end_markers_until_one_commits_them(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder
) -> None:
    batches = Envs(5, width=6, ends=0.05).fragments(8)
    feeder = start_feeder(broker.endpoints.worker, batches)
    first = stack.enter_context(EpisodeStream(broker.endpoints.learner))
    for _ in batches:
        assert first.next(TIMEOUT_S) is not None
    first.commit()
    wait_until(feeder.all_settled, "the settlement of all batches")
    position = first.position()
    first.close()
    _die(feeder, broker)
    second = EpisodeStream(broker.endpoints.learner, position=position)
    assert _markers(second) == _left(batches)
    second.close()
    with EpisodeStream(broker.endpoints.learner, position=position) as third:
        assert _markers(third) == _left(batches), "the second one died before it had committed them"
        third.commit()
        wait_until(lambda: broker.ask(lambda b: not b.core.sources[(0, 1)].end_due), "the commit of the end")
        position = third.position()
    with EpisodeStream(broker.endpoints.learner, position=position) as fourth:
        assert fourth.next(0.5) is None


def test_a_learners_own_position_has_the_open_episodes(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    """Three of six envs step no more in the second half. So the second learner knows them by the first one alone."""
    batches = Envs(5, width=6, ends=0.05).fragments(8)
    batches[4:] = [batch.select(batch.table["env_index"] < 3) for batch in batches[4:]]
    feeder = start_feeder(broker.endpoints.worker, batches)
    position: list[dict[str, Any]] = []
    for _ in range(2):
        with EpisodeStream(broker.endpoints.learner, position=position, auto_commit=False) as stream:
            for _ in range(4):
                assert stream.next(TIMEOUT_S) is not None
            position = orjson.loads(orjson.dumps(stream.position()))
            stream.commit()
    wait_until(feeder.all_settled, "the settlement of all batches")
    _die(feeder, broker)
    before_the_end = position
    for commits in (False, True):
        with EpisodeStream(broker.endpoints.learner, position=position, auto_commit=False) as stream:
            assert _markers(stream) == _left(batches)
            if commits:
                position = stream.position()
                stream.commit()
    assert "open_episodes" not in position[0]
    with EpisodeStream(broker.endpoints.learner, position=before_the_end) as older:
        assert _markers(older) == _left(batches), "its checkpoint is the copy that was left, so it lacks that end"
        older.commit()
    with EpisodeStream(broker.endpoints.learner, position=position) as last:
        assert last.next(0.5) is None


@pytest.mark.parametrize("dies", [False, True])
def test_batches_that_were_committed_after_the_checkpoint_are_a_hole_in_its_episodes(
    broker: BrokerThread, start_feeder: StartFeeder, dies: bool
) -> None:
    """The learner's newest checkpoint is lost, and an older copy is left. `dies`: the worker does too."""
    batches = Envs(5, width=6, ends=0.05, fails=0.0).fragments(12)
    feeder = start_feeder(broker.endpoints.worker, batches if not dies else batches[:8])
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner, auto_commit=False) as stream:
        for number in range(8):
            batch = stream.next(TIMEOUT_S)
            assert batch is not None
            if number < 4:
                witness.see(batch)
                position = stream.position()
        stream.commit()
        wait_until(lambda: feeder.session.settled.seq == 8, "the settlement of the first batches")
    if dies:
        _die(feeder, broker)
    resumes = 0
    while witness.open_episodes() & {name for name, *_ in _left(batches[:4])}:
        with EpisodeStream(broker.endpoints.learner, position=position, auto_commit=False) as stream:
            batch = stream.next(TIMEOUT_S)
            while batch is not None:
                witness.see(batch)
                batch = stream.next(0.3) if dies else None
            position, resumes = stream.position(), resumes + 1
            stream.commit()
        assert resumes < 8


def test_a_position_with_rows_that_are_no_episodes_is_refused() -> None:
    place = {"slot": 0, "incarnation": 1, "settled": {"seq": 3, "committed": [30, 6]}}
    told = {"agents": [], "modules": [], "columns": {}, "rows": "?"}
    with pytest.raises(DecodeError, match="rows of open episodes"):
        by_broker([{**place, "open_episodes": told}], "", 1)


def test_no_end_marker_comes_for_episodes_of_batches_that_never_arrived(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    """The worker cut two batches that never reached the broker, so it knows no episode that they began or ended."""
    batches = Envs(8, width=4).fragments(10)
    feeder = start_feeder(broker.endpoints.worker, batches[:8])
    with EpisodeStream(broker.endpoints.learner) as first:
        for _ in range(8):
            assert first.next(TIMEOUT_S) is not None
        first.commit()
        wait_until(feeder.all_settled, "the settlement of all batches")
        position = first.position()
    _die(feeder, broker)
    with EpisodeStream(broker.endpoints.learner, position=position) as second:
        assert _markers(second) == _left(batches[:8])


def test_end_markers_wait_until_a_worker_reports_the_spaces(
    start_broker: StartBroker, stack: ExitStack, start_feeder: StartFeeder
) -> None:
    """Broker, worker and learner die together: the next broker knows spaces from the next worker."""
    batches = Envs(9, width=4).fragments(6)
    broker = start_broker()
    feeder = start_feeder(broker.endpoints.worker, batches)
    with EpisodeStream(broker.endpoints.learner) as first:
        for _ in batches:
            assert first.next(TIMEOUT_S) is not None
        first.commit()
        wait_until(feeder.all_settled, "the settlement of all batches")
        position = first.position()
    feeder.stop()
    broker.stop()
    after = start_broker()
    second = stack.enter_context(EpisodeStream(after.endpoints.learner, position=position))
    _die(feeder, after)
    assert second.next(0.5) is None
    start_feeder(after.endpoints.worker, Envs(3).fragments(1), incarnation=2)
    assert _markers(second) == _left(batches)
    rest = second.next(TIMEOUT_S)
    assert rest is not None
    assert rest.incarnation == 2


def test_a_learner_forgets_a_life_that_the_broker_has_folded() -> None:
    place = SourcePosition(slot=0, incarnation=1, settled=Settled(seq=3, committed=(30, 6)), ended=True)
    session = LearnerSession("token", StreamLimits(), position=[place])
    session.receive(LearnerWelcome(fleet_id=FLEET, epoch=1), 0.0)
    session.receive(SourceEnd(slot=0, incarnation=1, seq=3, reason="worker_killed"), 0.0)
    assert session.position() == [place]
    session.receive(SourceEnd(slot=0, incarnation=1, seq=0, reason="worker_killed"), 0.0)
    assert session.position() == []
    session.commit(1.0)
