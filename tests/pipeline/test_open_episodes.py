"""Each episode that a dead worker left open gets its end marker, also at a learner that started after its chunks."""

from __future__ import annotations

import os
import tracemalloc
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.streaming.continuity import SourceEpisodes
from headrace.learner_stub.streaming.session import LearnerSession, StreamLimits
from headrace.learner_stub.streaming.source_progress import by_broker
from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.chunks import episode_log
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import format_episode_id
from headrace.schemas.chunks.episode_log import EpisodeLog, read_open_episodes
from headrace.schemas.chunks.open_episodes import OPEN_EPISODE, OpenEpisodes, open_episodes
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


def _told(told: OpenEpisodes, seq: int) -> Left:
    rows = told.after(seq)["chunk"]
    return {(format_episode_id(*row.tolist()[:2]), int(row["chunk_index"]) + 1, int(row["t_start"])) for row in rows}


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 4),
    lag=st.integers(0, 6),
    rewrite_bytes=st.sampled_from([1 << 20, 2000]),
    torn=st.integers(0, 300),
)
def test_the_episode_log_gives_the_open_episodes_after_each_unsettled_batch(
    tmp_path_factory: pytest.TempPathFactory, seed: int, width: int, lag: int, rewrite_bytes: int, torn: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "worker-0-1.episodes"
    batches = Envs(seed, width, fails=0.1).fragments(20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episode_log, "_REWRITE_BYTES", rewrite_bytes)
        log = EpisodeLog(path)
        for seq, batch in enumerate(batches, start=1):
            log.append(batch, seq, max(0, seq - lag))
        log.close()
    with path.open("ab") as file:
        file.write(path.read_bytes()[: min(torn, 60)])  # the beginning of a record that a kill has cut off
    told = read_open_episodes(path, len(batches) - lag)
    assert told is not None
    for accepted in range(len(batches) - lag, len(batches) + 1):
        assert _told(told, accepted) == _left(batches[:accepted])


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 4),
    missing=st.sets(st.integers(0, 19)),
    resumes=st.sets(st.integers(1, 19), max_size=4),
    opened=st.sets(st.integers(1, 19)),
    between=st.sets(st.integers(1, 19)),
    has_log=st.booleans(),
)
def test_a_learner_that_goes_on_from_its_checkpoint_ends_each_episode_once(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    width: int,
    missing: set[int],
    resumes: set[int],
    opened: set[int],
    between: set[int],
    has_log: bool,
) -> None:
    """A batch may be missing right after the checkpoint, or before it: what it broke stays broken.

    opened: batches that have been read, and not handed out, when a checkpoint is made.
    between: batches before which a checkpoint is made once their markers were handed out.
    """

    def go_on() -> SourceEpisodes:
        told = episodes.still_open()
        before = told and OpenEpisodes.model_validate_json(told.model_dump_json())
        return SourceEpisodes(is_whole=False, before=before, gap_reason=episodes.gap_reason)

    path = tmp_path_factory.mktemp("log") / "worker-0-1.episodes"
    batches, log = Envs(seed, width, fails=0.1).fragments(20), EpisodeLog(path)
    episodes, witness = SourceEpisodes(), Witness()
    for number, batch in enumerate(batches):
        log.append(batch, number + 1, 0)
        if number in resumes:
            if number in opened:
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
    log.close()
    told = read_open_episodes(path, 20) if has_log else None
    episodes.learn(SourceEnd(slot=0, incarnation=1, seq=20, reason="worker_killed", open_episodes=told), MODULES)
    for markers in episodes.end("worker_killed"):
        witness.see(markers)
    assert not witness.open_episodes()


def test_memory_for_a_batch_that_waits_does_not_grow_with_the_source() -> None:
    """After a gap a batch of three chunks is read, from a source of 20,000 envs."""
    episodes, envs = SourceEpisodes(), Envs(1, 3, ends=0.0, fails=0.0)
    far = envs.fragment()
    far.table["env_index"] += 19_997
    episodes.take(far)
    episodes.note_handed_out()
    episodes.gap_reason = "overflow"
    tracemalloc.start()
    try:
        episodes.take(envs.fragment())
        assert tracemalloc.get_traced_memory()[1] < episodes._open.nbytes / 10
    finally:
        tracemalloc.stop()


def test_an_unfinished_episode_of_several_agents_counts_once() -> None:
    rows = np.zeros(4, OPEN_EPISODE)
    rows["chunk"]["id_low"] = [7, 7, 8, 9]
    rows["chunk"]["episode_return"] = [1.5, 2.0, np.nan, 4.0]
    rows["chunk"]["t_start"] = [30, 40, 10, 0]
    assert open_episodes(rows, ["a"], ["m"], {}).unfinished(0) == [(3.5, 40)]


def test_the_episode_log_stays_small(tmp_path: Path) -> None:
    log, envs = EpisodeLog(tmp_path / "a.episodes"), Envs(width=4)
    for seq, batch in enumerate(envs.fragments(40) * 100, start=1):
        log.append(batch, seq, seq)
    log.close()
    assert log.path.stat().st_size < 6 << 20


def test_a_log_that_waited_says_once_that_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace.worker")
    log, batch, whole = EpisodeLog(tmp_path / "a.episodes"), Envs().fragment(), os.pwrite
    for seq, is_full in enumerate([False, True, True, False, False], start=1):
        monkeypatch.setattr("os.pwrite", partial(_write_some, whole, is_full, False))
        log.append(batch, seq, 0)
    log.close()
    assert ["waits for room" in caplog.messages[0], "has room again" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


def _write_some(whole: Any, is_full: bool, is_full_for_new_files: bool, file: int, content: bytes, at: int) -> int:
    written: int = whole(file, content[:9] if is_full or (is_full_for_new_files and at == 0) else content, at)
    return written


@pytest.mark.long
def test_a_disk_that_is_full_for_a_while_leaves_no_hole_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(episode_log, "_REWRITE_BYTES", 2000)
    batches, log, whole = Envs(3, width=4).fragments(60), EpisodeLog(tmp_path / "a.episodes"), os.pwrite
    for seq, batch in enumerate(batches, start=1):
        settled, is_full = max(0, seq - 4), seq % 7 in (2, 3)
        monkeypatch.setattr("os.pwrite", partial(_write_some, whole, is_full, seq % 2 == 0))
        log.append(batch, seq, settled)
        if not is_full:
            told = read_open_episodes(log.path, settled)
            assert told is not None
            for accepted in range(settled, seq + 1):
                assert _told(told, accepted) == _left(batches[:accepted])
    assert len([record for record in caplog.records if "waits for room" in record.message]) == len(range(2, 61, 7))
    log.close()


def test_a_disk_that_stays_full_ends_the_log_and_not_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, batch = EpisodeLog(tmp_path / "a.episodes"), Envs().fragment()
    monkeypatch.setattr("os.pwrite", lambda *_: 3)
    monkeypatch.setattr(episode_log, "_MOST_WAITING", 2000)
    for seq in range(1, 100):
        log.append(batch, seq, 0)
    assert not log.path.exists()
    assert ["waits for room" in caplog.messages[0], "ends" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


def _die(
    feeder: Feeder, broker: BrokerThread, batches: list[ChunkBatch], folder: Path, *, lose_log: bool = False
) -> None:
    """End a worker without a word, and let a supervisor tell the broker what it left, as its log says."""
    feeder.stop()
    log = EpisodeLog(folder / "worker-0-1.episodes")
    for seq, batch in enumerate(batches, start=1):
        log.append(batch, seq, 0)
    log.close()
    if lose_log:
        log.path.unlink()
    obituary = Obituary(
        slot=0,
        incarnation=1,
        totals=feeder.totals,
        settled=feeder.session.settled,
        window=feeder.session.window(),
        open_episodes=read_open_episodes(log.path, feeder.session.settled.seq),
        reason="worker_killed",
    )
    with RawPeer(broker.endpoints.worker) as supervisor:
        supervisor.send(SupervisorHello(fleet_id=FLEET, token="s").frames())
        supervisor.send(obituary.frames())
        wait_until(lambda: (row := broker.rows().get((0, 1))) and row.closed, "the closed books")


def _markers(stream: EpisodeStream) -> Left:
    batch = stream.next(TIMEOUT_S)
    assert batch is not None
    assert batch.columns.keys() == {"obs", "actions", "rewards", "weights_seq"}
    assert {chunk.end_reason for chunk in batch} == {"worker_killed"}
    assert {chunk.agent_id for chunk in batch} == {"default_agent"}
    return {(chunk.episode_id, chunk.chunk_index, chunk.t_start) for chunk in batch}


@pytest.mark.parametrize("with_position", [False, True])
def test_new_learners_get_a_dead_workers_end_markers_until_one_commits_them(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, tmp_path: Path, with_position: bool
) -> None:
    batches = Envs(5, width=6, ends=0.05).fragments(8)
    feeder = start_feeder(broker.endpoints.worker, batches)
    first = stack.enter_context(EpisodeStream(broker.endpoints.learner))
    for _ in batches:
        assert first.next(TIMEOUT_S) is not None
    first.commit()
    wait_until(feeder.all_settled, "the settlement of all batches")
    position: list[dict[str, Any]] | None = first.position() if with_position else None
    first.close()
    _die(feeder, broker, batches, tmp_path)
    report = broker.report()
    assert report.counters[0, 1]["aborted_episodes_total"] == report.gauges["aborted_window"] == len(_left(batches))
    assert report.gauges["aborted_len_mean"] == np.mean([steps for _, _, steps in _left(batches)])

    second = EpisodeStream(broker.endpoints.learner, position=position)
    assert _markers(second) == _left(batches)
    second.close()
    with EpisodeStream(broker.endpoints.learner, position=position) as third:
        assert _markers(third) == _left(batches), "the second one died before it had committed them"
        third.commit()
        wait_until(lambda: broker.ask(lambda b: not b.core.sources[(0, 1)].end_due), "the commit of the end")
        position = third.position() if with_position else None
    with EpisodeStream(broker.endpoints.learner, position=position) as fourth:
        assert fourth.next(0.5) is None


def test_a_learners_own_position_has_the_open_episodes_if_the_workers_log_is_lost(
    broker: BrokerThread, start_feeder: StartFeeder, tmp_path: Path
) -> None:
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
    _die(feeder, broker, batches, tmp_path, lose_log=True)
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
    broker: BrokerThread, start_feeder: StartFeeder, tmp_path: Path, dies: bool
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
        _die(feeder, broker, batches[:8], tmp_path)
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
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    """The worker cut two batches that never reached the broker, so it knows no episode that they began or ended."""
    batches = Envs(8, width=4).fragments(10)
    feeder = start_feeder(broker.endpoints.worker, batches[:8])
    with EpisodeStream(broker.endpoints.learner) as first:
        for _ in range(8):
            assert first.next(TIMEOUT_S) is not None
        first.commit()
        wait_until(feeder.all_settled, "the settlement of all batches")
    _die(feeder, broker, batches, tmp_path)
    with EpisodeStream(broker.endpoints.learner) as second:
        assert _markers(second) == _left(batches[:8])


def test_end_markers_wait_until_a_worker_reports_the_spaces(
    start_broker: StartBroker, stack: ExitStack, start_feeder: StartFeeder, tmp_path: Path
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
    _die(feeder, after, batches, tmp_path)
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
