"""The stamps of tasks on a batch: on the wire, in parts of it, in groups, and on the markers that a learner makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from golden_samples import SPACES, header_of, make_batch

from headrace.learner_stub.rollouts.rollout import chosen
from headrace.learner_stub.streaming.continuity import SourceEpisodes
from headrace.schemas.chunks.batch import OFF_POLICY, ChunkBatch, encode_batch
from headrace.schemas.chunks.chunk import ChunkEnd, to_episode
from headrace.schemas.chunks.open_episodes import OpenEpisodes
from headrace.schemas.chunks.task import Task, groups_of, stamps
from headrace.schemas.errors import DecodeError, InfosTooLargeError
from headrace.schemas.frames.wire import decode_header
from support.decode_batch import decode_batch

BOX = SPACES["box"]
EASY, HARD = Task((1, 2), {"level": 1, "map": [1, 2]}), Task((1, 3), {"level": 9.5}, 7, 1)
ENDS = [ChunkEnd.ONGOING, ChunkEnd.TERMINATED, ChunkEnd.ONGOING, ChunkEnd.ABORTED]


def batch_of(tasks: list[Task | None], lengths: tuple[int, ...] = (2, 3, 1, 0), ends: Any = None) -> ChunkBatch:
    batch = make_batch(BOX, list(lengths), ENDS if ends is None else ends, {})
    distinct, task_of = stamps(tasks)
    return replace(batch, tasks=distinct, task_of=task_of)


def received(batch: ChunkBatch, **changed: Any) -> ChunkBatch:
    if changed:
        batch = replace(batch, **changed)
    frames = [bytes(frame) for frame in encode_batch(batch, header_of(batch))]
    return decode_batch(frames, batch.observation_space, batch.action_space)[1]


def tasks_in(batch: Any) -> list[Task | None]:
    return [chunk.task for chunk in batch]


def test_stamps_come_over_the_wire_and_equal_tasks_once() -> None:
    batch = batch_of([EASY, None, HARD, replace(EASY)])
    read = received(batch)
    assert tasks_in(read) == tasks_in(batch) == [EASY, None, HARD, EASY]
    assert len(read.tasks) == 2
    assert read.task_of is not None
    assert read.task_of.dtype == np.int32


def test_a_batch_without_tasks_is_the_same_bytes_as_before() -> None:
    batch = batch_of([None] * 4)
    assert batch.task_of is None
    header = decode_header(encode_batch(batch, header_of(batch)))[1]
    assert header.keys().isdisjoint({"tasks", "task_of"})
    assert tasks_in(received(batch)) == [None] * 4


@pytest.mark.parametrize("numbers", [[1, 0, 0], [1, 0, 0, 3]], ids=["too few", "too high"])
def test_numbers_that_do_not_fit_are_refused(numbers: list[int]) -> None:
    batch = batch_of([EASY, None, HARD, None])
    with pytest.raises(DecodeError, match="bad_tasks"):
        received(batch, task_of=np.array(numbers, np.int32))


def test_parts_of_a_batch_keep_the_stamps_of_their_chunks() -> None:
    batch = batch_of([EASY, None, HARD, EASY])
    part = batch.select(np.array([False, True, True, False]))
    assert tasks_in(part) == [None, HARD]
    assert list(part.tasks) == [HARD]
    first, second = batch.halves()
    assert (tasks_in(first), tasks_in(second)) == ([EASY, None], [HARD, EASY])
    assert tasks_in(chosen(batch)) == [EASY, None, HARD]
    assert batch[0][0:1].task == EASY
    assert to_episode([batch[0]]).task == EASY
    assert tasks_in(received(part)) == [None, HARD]


def test_by_task_gives_each_chunk_once_and_what_connectors_learnt_once() -> None:
    learnt = {"env_to_module/0": np.ones(2)}
    batch = replace(batch_of([EASY, None, HARD, EASY]), connector_update=learnt)
    parts = batch.by_task()
    assert [task for task, _ in parts] == [None, EASY, HARD]
    assert [len(part) for _, part in parts] == [1, 2, 1]
    assert all(chunk.task == task for task, part in parts for chunk in part)
    assert [bool(part.connector_update) for _, part in parts] == [True, False, False]
    assert batch_of([None] * 4).by_task()[0][0] is None


def test_too_many_bytes_of_tasks_split_the_batch() -> None:
    large = [Task((1, 1), {"map": "x" * 300_000}, 0, member) for member in range(4)]
    batch = batch_of(list(large))
    with pytest.raises(InfosTooLargeError, match="tasks"):
        encode_batch(batch, header_of(batch))
    assert [tasks_in(received(part)) for half in batch.halves() for part in half.halves()] == [[task] for task in large]


def test_groups_are_complete_or_name_their_missing_members() -> None:
    tasks: list[Task | None] = [Task((1, 1), {}, 0, 0), Task((1, 1), {}, 0, 1), Task((1, 1), {}, 1, 2), None]
    ends = [ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED, ChunkEnd.TERMINATED, ChunkEnd.ABORTED]
    batch = batch_of(tasks, ends=ends)
    complete, missing = groups_of([batch], 2)
    assert [[c.task and c.task.member for c in member] for member in complete[(1, 1), 0]] == [[0], [1]]
    assert missing == {((1, 1), 1): [0, 1]}
    assert groups_of(batch, 3) == ({}, {((1, 1), 0): [2], ((1, 1), 1): [0, 1]})
    open_one = batch_of(tasks, ends=[ChunkEnd.ONGOING, *ends[1:]])
    assert groups_of(list(open_one), 2)[1][(1, 1), 0] == [0]


def one_module(batch: ChunkBatch) -> ChunkBatch:
    table = batch.table.copy()
    table["module"] = table["agent"] = table["reason"] = table["chunk_index"] = 0
    table["env_index"] = table["id_low"] = np.arange(len(table))
    return replace(batch, table=table, agents=("a",), modules=("m",), reasons=("",))


def test_the_markers_of_a_source_that_ends_have_the_tasks() -> None:
    source = SourceEpisodes()
    source.take(one_module(batch_of([EASY, None, HARD], (2, 3, 1), [ChunkEnd.ONGOING] * 3)))
    (markers,) = source.end("gone")
    assert {chunk.env_index: chunk.task for chunk in markers} == {0: EASY, 1: None, 2: HARD}
    assert tasks_in(received(markers, reasons=("", "gone"))) == tasks_in(markers)


def test_a_checkpoint_keeps_the_tasks_of_open_episodes() -> None:
    source = SourceEpisodes()
    source.take(one_module(batch_of([EASY, None, HARD], (2, 3, 1), [ChunkEnd.ONGOING] * 3)))
    told = source.still_open()
    assert told is not None
    known = OpenEpisodes.model_validate_json(orjson.dumps(told.model_dump(mode="json")))
    later = SourceEpisodes(before=known, gap_reason="gap")
    new = batch_of([None] * 3, (2, 3, 1), [ChunkEnd.ONGOING] * 3)
    fresh = one_module(new)
    fresh.table["id_low"] += 100
    markers = later.take(fresh).markers
    assert markers is not None
    assert {chunk.env_index: chunk.task for chunk in markers} == {0: EASY, 1: None, 2: HARD}


def test_after_a_gap_a_marker_has_the_task_of_its_episode_and_not_of_the_next() -> None:
    source = SourceEpisodes()
    source.take(one_module(batch_of([EASY, None, HARD], (2, 3, 1), [ChunkEnd.ONGOING] * 3)))
    source.gap_reason = "lost"
    other = one_module(batch_of([HARD, EASY, None], (2, 3, 1), [ChunkEnd.ONGOING] * 3))
    other.table["id_low"] += 100
    found = source.take(other)
    assert found.markers is not None
    assert {chunk.env_index: chunk.task for chunk in found.markers} == {0: EASY, 1: None, 2: HARD}
    assert tasks_in(found.batch) == [HARD, EASY, None]


def test_a_source_forgets_the_tasks_of_episodes_that_are_over() -> None:
    source = SourceEpisodes()
    for i in range(200):
        batch = one_module(batch_of([EASY, EASY, HARD], (2, 3, 1), [ChunkEnd.TERMINATED] * 3))
        batch.table["id_low"] += 100 * i
        source.take(batch)
    assert len(source._tasks) < 20


def test_a_marker_of_an_episode_that_began_in_a_gap_has_the_task_of_its_chunk() -> None:
    source = SourceEpisodes(gap_reason="lost")
    batch = one_module(batch_of([EASY, None, HARD], (2, 3, 1), [ChunkEnd.ONGOING] * 3))
    batch.table["chunk_index"] = 4
    found = source.take(batch)
    assert found.markers is not None
    assert tasks_in(found.markers) == [EASY, None, HARD]
    assert tasks_in(found.batch) == []


def test_runs_of_steps_that_a_policy_chose_keep_the_task_of_their_chunk() -> None:
    batch = batch_of([EASY, None, HARD], (4, 3, 1), [ChunkEnd.ONGOING] * 3)
    logged = np.array([False, True, False, False, True, True, True, False])
    runs = chosen(replace(batch, arrays={**batch.arrays, OFF_POLICY: logged}))
    assert tasks_in(runs) == [EASY, EASY, HARD]
