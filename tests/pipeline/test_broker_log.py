"""The broker's log: acknowledged batches survive any crash, and a damaged end costs only unacknowledged batches."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from headrace.broker.files.batch_log import BatchLog, LogNote, log_folder, segment_paths
from headrace.broker.files.log_records import BATCH, MAGIC, Record, SegmentReader, encode_record
from headrace.broker.files.state_file import read_broker_file
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import Settled, add_up
from headrace.schemas.errors import DiskFullError, RunDirError
from support.pipeline.delivery import (
    Envs,
    StartBroker,
    StartFeeder,
    Witness,
    batches_of,
    broker_process,
)
from support.waiting import TIMEOUT_S, wait_until

MIB = 1 << 20
LOGGED = {"log": True, "ack": "broker"}


def test_after_a_kill_the_next_broker_delivers_each_acknowledged_batch_once(
    stack: ExitStack, start_feeder: StartFeeder, start_broker: StartBroker, tmp_path: Path
) -> None:
    """The worker has forgotten the bytes, and dies with the broker before a learner comes."""
    process = stack.enter_context(broker_process(tmp_path, **LOGGED))
    file = read_broker_file(tmp_path)
    assert file is not None
    plan = Envs(1, fails=0.0).fragments(30)
    feeder = start_feeder(file.endpoints.worker, plan, window=3, ack="broker")
    wait_until(lambda: feeder.session.accepted == 30, "thirty batches on disk")
    feeder.stop()
    process.signal(signal.SIGKILL)
    process.wait()
    folder = log_folder(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in segment_paths(folder)} == {0o600}
    again, witness = start_broker(**LOGGED), Witness()
    with EpisodeStream(again.endpoints.learner) as stream:
        for batch in batches_of(stream, lambda: witness.steps == sum(batch.steps for batch in plan)):
            witness.see(batch)
        stream.commit()
        wait_until(lambda: again.held_bytes() == 0, "the end of all batches")
    assert add_up(again.rows()).dropped == {}
    again.stop()
    assert not segment_paths(folder)


def test_a_live_worker_and_learner_continue_with_a_broker_that_reads_its_log(
    start_feeder: StartFeeder, start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """A learner has trained on a part, and the log ends in the middle of a record."""
    broker, witness, fragments = start_broker(**LOGGED), Witness(), Envs(2).fragments(40)
    gate = threading.Event()
    plan = [*fragments[:20], *fragments[20:]]
    feeder = start_feeder(
        broker.endpoints.worker,
        (batch if number < 20 or gate.is_set() else None for number, batch in _until(gate, plan)),
        window=50,
        ack="broker",
    )
    wait_until(lambda: feeder.session.accepted == 20, "twenty batches on disk")
    with EpisodeStream(broker.endpoints.learner) as stream:
        for _ in range(5):
            witness.see(stream.next(timeout_s=TIMEOUT_S))
        stream.commit()
        wait_until(lambda: feeder.session.settled.seq >= 5, "five batches settled")
        broker.stop()
        with segment_paths(log_folder(broker.broker.run_dir))[-1].open("ab") as segment:
            segment.write(b"".join(map(bytes, encode_record(Record(BATCH, [b"torn" * 50]))))[:-7])
        with caplog.at_level(logging.WARNING):
            again = start_broker(**LOGGED)
        assert "of an unfinished record at the end of" in caplog.text
        gate.set()
        for batch in batches_of(stream, feeder.all_settled):
            witness.see(batch)
    assert witness.steps == sum(feeder.steps.values())
    assert add_up(again.rows()).dropped == {}


def _until(gate: threading.Event, plan: list[object]):  # type: ignore[no-untyped-def]
    """Number the plan; repeat number 20 until the gate is open."""
    for number, batch in enumerate(plan):
        while number == 20 and not gate.is_set():
            yield number, None
        yield number, batch


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_cut_or_changed_segment_gives_the_records_before_the_damage(tmp_path: Path) -> None:
    numbers = random.Random(0)
    frames = [[numbers.randbytes(numbers.randint(0, 60)) for _ in range(numbers.randint(0, 4))] for _ in range(20)]
    records = [b"".join(map(bytes, encode_record(Record(BATCH, each)))) for each in frames]
    ends = [len(MAGIC) + sum(map(len, records[:n])) for n in range(len(records) + 1)]
    whole, path = MAGIC + b"".join(records), tmp_path / "00000001.log"
    for _ in range(400):
        at = numbers.randrange(len(whole))
        damaged = whole[:at] if numbers.random() < 0.5 else whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :]
        path.write_bytes(damaged)
        reader = SegmentReader(path)
        found = [[bytes(frame) for frame in record.frames] for record in reader.records()]
        intact = sum(end <= at for end in ends) - 1
        assert found == frames[: max(0, intact)]
        assert reader.readable == (ends[intact] if intact >= 0 else 0)


class Log:
    """A log with its wake as an event, and sources whose settled number a test sets."""

    def __init__(self, run_dir: Path, max_bytes: int = MIB, when_full: str = "stop") -> None:
        self.settled: dict[tuple[int, int], Settled] = {}
        self.synced: list[tuple[tuple[int, int], int]] = []
        self.log = BatchLog(run_dir, max_bytes, when_full, lambda: None)  # type: ignore[arg-type]
        self.found = list(self.log.recover())
        self.log.start()

    def write(self, seq: int, nbytes: int = 50_000) -> None:
        """Log a batch, and wait for its end."""
        self.log.append((0, 1), seq, [bytes(nbytes)], nbytes)
        wait_until(lambda: self._take() or self.synced[-1:] == [((0, 1), seq)], f"batch {seq} on disk")

    def write_all(self, batches: int) -> None:
        for seq in range(1, batches + 1):
            self.write(seq)

    def _take(self) -> None:
        self.synced += self.log.take_synced()

    def settle(self, seq: int) -> None:
        self.settled[(0, 1)] = Settled(seq=seq, committed=(seq, seq))
        self.log.retire(self.settled, {"default_policy": {}}, self.is_over)

    def is_over(self, key: tuple[int, int], seq: int) -> bool:
        return key in self.settled and seq <= self.settled[key].seq

    def nbytes(self) -> int:
        size = 0
        for path in segment_paths(self.log.folder):
            with suppress(FileNotFoundError):  # the log's thread has removed it since it was listed
                size += path.stat().st_size
        return size


def test_settled_segments_are_removed_and_a_new_log_knows_the_settled_position(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for seq in range(1, 16):
        log.write(seq)
    first = segment_paths(log.log.folder)[0]
    assert len(segment_paths(log.log.folder)) > 3
    log.settle(13)
    wait_until(lambda: not first.exists(), "the end of the first segment")
    wait_until(lambda: log.nbytes() < 6 * 50_000, "the end of all but the last segments")
    log.log.close(log.is_over)
    again = Log(tmp_path)
    notes = [found for found in again.found if isinstance(found, LogNote)]
    assert notes[-1].sources() == {(0, 1): Settled(seq=13, committed=(13, 13))}
    assert notes[-1].spaces == {"default_policy": {}}
    assert {b"".join(map(bytes, found)) for found in again.found if isinstance(found, list)} == {bytes(50_000)}
    again.log.close(again.is_over)


def test_a_full_log_stops_the_broker_with_an_error_that_names_the_settings(tmp_path: Path) -> None:
    log = Log(tmp_path)
    with pytest.raises(RunDirError, match=r"broker.log_max_bytes = 1048576 .*log_when_full = 'go_on'"):
        log.write_all(40)
    log.log.close(log.is_over)
    assert 15 < len(log.synced) < 21


def test_with_log_when_full_go_on_batches_are_acknowledged_without_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log(tmp_path, when_full="go_on")
    log.write_all(40)
    assert log.nbytes() <= MIB
    assert "the broker's log is full" in caplog.text
    assert "batches are acknowledged without it" in caplog.text
    log.log.close(log.is_over)


@pytest.mark.parametrize("when_full", ["stop", "go_on"])
def test_a_full_disk_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_full: str) -> None:
    real = os.writev

    def full(file: int, pieces: list[memoryview]) -> int:
        if sum(piece.nbytes for piece in pieces) > 10_000:
            real(file, [bytes(pieces[0])])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, pieces)

    log = Log(tmp_path, when_full=when_full)
    log.write(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        if when_full == "stop":
            with pytest.raises(DiskFullError, match="the broker's log cannot be written"):
                log.write(2)
        else:
            log.write(2)
    log.log.close(log.is_over)
    again = Log(tmp_path)
    assert len(again.found) == 1
    again.log.close(again.is_over)


def test_a_segment_that_cannot_be_removed_ends_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlink(self: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log = Log(tmp_path)
    for seq in range(1, 8):
        log.write(seq)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        log.settle(7)
        for seq in range(8, 12):
            log.write(seq)
        log.log.close(log.is_over)
    again = Log(tmp_path)
    notes = [found for found in again.found if isinstance(found, LogNote)]
    assert notes[-1].sources()[0, 1].seq == 7
    again.log.close(again.is_over)


def test_a_segment_stays_readable_though_a_torn_record_could_not_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.writev

    def broken(file: int, pieces: list[memoryview]) -> int:
        real(file, [bytes(pieces[0])])
        raise OSError(errno.EIO, "Input/output error")

    def no_cut(file: int, length: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log = Log(tmp_path, when_full="go_on")
    log.write(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", broken)
        patch.setattr(os, "ftruncate", no_cut)
        log.write(2)
    monkeypatch.setattr(log.log, "_paused_until", 0.0)
    log.write(3)
    log.log.close(log.is_over)
    again = Log(tmp_path)
    assert len([found for found in again.found if isinstance(found, list)]) == 2
    again.log.close(again.is_over)


def test_a_link_in_place_of_the_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    log_folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match="symbolic link"):
        Log(tmp_path)


def test_a_broker_without_a_log_warns_about_batches_in_an_old_log(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    log = Log(tmp_path)
    log.write(1)
    log.log.close(log.is_over)
    with caplog.at_level(logging.WARNING):
        start_broker()
    assert "its batches are not recovered" in caplog.text
