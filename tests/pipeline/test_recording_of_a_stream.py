"""A recording beside a real broker: each step once, whenever a kill, a full disk or the end comes."""

from __future__ import annotations

import errno
import logging
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")

import pyarrow.parquet as pq

from headrace.deploy.annexes.recording import compaction, recording_folder, recording_loop
from headrace.deploy.annexes.recording.recording_folder import RecordingFolder
from headrace.deploy.annexes.recording.recording_loop import Recording
from headrace.learner_stub import EpisodeStream
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import RunDirError
from support.pipeline.delivery import BrokerThread, Envs, Feeder, StartBroker, StartFeeder, batches_of
from support.waiting import TIMEOUT_S, wait_until


@pytest.fixture(autouse=True)
def _short_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a last file that is not full be written after 5 s."""
    monkeypatch.setattr(recording_loop, "FLUSH_AGE_S", 5.0)


@pytest.fixture
def broker(start_broker: StartBroker) -> BrokerThread:
    """A broker whose workers wait for the group "record"."""
    return start_broker(consumer_groups={"record": "wait"})


@pytest.fixture
def feeder(broker: BrokerThread, start_feeder: StartFeeder, stack: ExitStack) -> Feeder:
    """A worker that has shipped 20 batches, which the learner has committed."""
    feeder = start_feeder(broker.endpoints.worker, Envs(3).fragments(20))
    train = stack.enter_context(EpisodeStream(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S))
    for _ in batches_of(train, lambda: train.delivered == 20):
        pass
    train.commit()
    return feeder


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, but for the release of locks and sockets."""


def record(
    broker: BrokerThread,
    path: Path,
    until: Callable[[], bool] | None = None,
    *,
    prepare: Callable[[EpisodeStream], None] = lambda stream: None,
    **options: Any,
) -> int:
    """Record until `until()`, or until it raises. Return the number of steps written."""
    with (
        RecordingFolder(path) as folder,
        EpisodeStream(
            broker.endpoints.learner,
            group="record",
            position=folder.position,
            auto_commit=False,
            connect_timeout_s=TIMEOUT_S,
            **options,
        ) as stream,
    ):
        prepare(stream)
        recording, stopping = Recording(stream, folder), threading.Event()
        if until is None:
            recording.run(stopping)
        else:
            thread = threading.Thread(target=lambda: (wait_until(until, "the end of a recording"), stopping.set()))
            thread.start()
            recording.run(stopping)
            thread.join()
        return recording.steps


def steps_in(path: Path) -> list[tuple[str, int]]:
    tables = [pq.read_table(file) for file in sorted(path.glob("steps-*.parquet"))]
    return [(row["episode_id"], row["t"]) for table in tables for row in table.to_pylist()]


def files_in(path: Path) -> int:
    return len(list(path.glob("**/batches-*")))


def check(path: Path, feeder: Feeder) -> None:
    seen = steps_in(path)
    assert len(seen) == len(set(seen)) == sum(feeder.steps.values())


def test_a_kill_between_the_last_file_and_its_commit_writes_no_row_twice(
    broker: BrokerThread, feeder: Feeder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_loop, "FLUSH_BATCHES", 6)
    path = tmp_path / "recording"

    def at_commit(stream: EpisodeStream) -> None:
        before = files_in(path)

        def commit() -> None:
            if files_in(path) > before:
                raise Killed

        monkeypatch.setattr(stream, "commit", commit)

    for _ in range(2):
        with pytest.raises(Killed):
            record(broker, path, prepare=at_commit)
    assert not feeder.all_settled()
    assert files_in(path) == 2
    record(broker, path, feeder.all_settled)
    check(path, feeder)


def test_a_kill_before_the_last_file_of_a_number_loses_no_row(
    broker: BrokerThread, feeder: Feeder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_loop, "FLUSH_BATCHES", 6)
    path, replace = tmp_path / "recording", recording_folder.replace_private

    def killed(file: Path, content: bytes) -> None:
        if file.name.startswith("batches"):
            raise Killed
        replace(file, content)

    with monkeypatch.context() as patched:
        patched.setattr(recording_folder, "replace_private", killed)
        with pytest.raises(Killed):
            record(broker, path)
    record(broker, path, feeder.all_settled)
    check(path, feeder)


def test_a_full_disk_is_named_and_the_recording_goes_on_when_there_is_room(
    broker: BrokerThread,
    feeder: Feeder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(recording_loop, "RETRY_S", 0.05)
    monkeypatch.setattr(recording_loop, "FLUSH_BATCHES", 20)
    path, replace, failures = tmp_path / "recording", recording_folder.replace_private, iter(range(5))

    def full(file: Path, content: bytes) -> None:
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(file, content)

    monkeypatch.setattr(recording_folder, "replace_private", full)
    with caplog.at_level(logging.ERROR):
        steps = record(broker, path, feeder.all_settled)
    assert [one.getMessage() for one in caplog.records] == [
        f"recording {path}: the disk is full; free some space. {steps} steps wait for it, uncommitted, and are not lost"
    ]
    check(path, feeder)


def test_old_files_are_removed_while_a_write_waits_for_room(
    broker: BrokerThread, feeder: Feeder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_loop, "RETRY_S", 0.05)
    monkeypatch.setattr(recording_loop, "TEND_S", 0.05)
    path, replace, remove = tmp_path / "recording", recording_folder.replace_private, recording_loop.remove_oldest
    is_full, removals = threading.Event(), list[bool]()

    def full(file: Path, content: bytes) -> None:
        is_full.set()
        if sum(removals) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(file, content)

    def removing(*given: Any) -> None:
        removals.append(is_full.is_set())
        remove(*given)

    monkeypatch.setattr(recording_folder, "replace_private", full)
    monkeypatch.setattr(recording_loop, "remove_oldest", removing)
    record(broker, path, feeder.all_settled)
    check(path, feeder)


@pytest.mark.parametrize("rule", ["wait", "drop"])
def test_a_recording_on_a_disk_that_is_really_full_goes_on_when_there_is_room(
    start_broker: StartBroker,
    start_feeder: StartFeeder,
    stack: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rule: str,
) -> None:
    """Some files are written, and then there is no byte left, neither for a further one nor for their merge."""
    monkeypatch.setattr(recording_loop, "RETRY_S", 0.05)
    monkeypatch.setattr(recording_loop, "TEND_S", 0.05)
    monkeypatch.setattr(recording_loop, "FLUSH_BATCHES", 5)
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.decode().strip()}")
    stack.callback(subprocess.run, ["umount", "--lazy", disk], check=True)
    path, filler, is_full = disk / "recording", disk / "filler", threading.Event()

    def batches() -> Iterator[ChunkBatch | None]:
        envs = Envs(3)
        yield from envs.fragments(10)
        while not is_full.is_set():
            yield None
        yield from envs.fragments(60)

    broker = start_broker(consumer_groups={"record": rule}, max_held_batches=8)
    feeder = start_feeder(broker.endpoints.worker, batches())
    train = stack.enter_context(EpisodeStream(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S))
    streams: list[EpisodeStream] = []
    problems = f"recording {path}: the disk is full; free some space. ", "are not merged yet (No space left on device)"

    def is_done() -> bool:
        while train.next(0.02) is not None:
            train.commit()
        if not is_full.is_set() and files_in(path) > 1 and not feeder.session.window():
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
                file.writelines(repeat(bytes(512)))
            monkeypatch.setattr(compaction, "MERGE_AGE_S", -1.0)
            is_full.set()
        as_ruled = feeder.blocked if rule == "wait" else feeder.all_settled()
        if as_ruled and filler.exists() and all(problem in caplog.text for problem in problems):
            filler.unlink()
        held = broker.ask(lambda broker: broker.core.groups.by_name["record"].store.batches)
        return is_full.is_set() and not filler.exists() and feeder.all_settled() and not held

    record(broker, path, is_done, prepare=streams.append, window_batches=4)
    assert [one.levelname for one in caplog.records].count("ERROR") == 1
    assert not list(path.rglob(".*")), "a file that did not fit is left"
    assert not list((path / "unmerged").iterdir())
    seen, dropped = steps_in(path), sum(streams[0].dropped.values())
    assert len(seen) == len(set(seen)) == sum(feeder.steps.values()) - dropped
    assert bool(dropped) == (rule == "drop")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"the disk is full; free some space. 1\d\d steps wait for it, uncommitted, and are not lost"),
        (errno.EROFS, r"it cannot be written to \(Read-only file system\); repair that, and record again"),
    ],
)
def test_a_recording_that_cannot_write_its_last_file_ends_with_a_sentence_and_loses_nothing(
    broker: BrokerThread, feeder: Feeder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    path = tmp_path / "recording"
    streams: list[EpisodeStream] = []

    def broken(*_: Any) -> None:
        raise OSError(number, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(recording_folder, "replace_private", broken)
        with pytest.raises(RunDirError, match=said):
            record(broker, path, lambda: bool(streams) and streams[0].delivered == 20, prepare=streams.append)
    record(broker, path, feeder.all_settled)
    check(path, feeder)


def test_a_recording_commits_at_once_when_no_worker_is_left(
    broker: BrokerThread, feeder: Feeder, tmp_path: Path
) -> None:
    path = tmp_path / "recording"
    feeder.leave()
    record(broker, path, lambda: files_in(path) > 0)
    check(path, feeder)
