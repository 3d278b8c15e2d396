"""The recorder of a worker is whole after a kill at any moment, and its window names each unsettled batch."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from headrace.schemas.accounts.ledger import COUNTERS, Discard, Drop, HeldBatch, Settled, WorkerTotals
from headrace.schemas.accounts.recorder import Reading, Recorder, read_recorder
from headrace.schemas.accounts.recorder_file import AREA
from headrace.schemas.basics.bounds import WINDOW
from headrace.schemas.errors import RunDirError
from support.thorough import schedules
from support.waiting import wait_until

pytestmark = pytest.mark.processes

KILLS = 240


def _work_forever(path: Path) -> None:
    """Write to a recorder as a worker does, as fast as possible: step, cut, drop, discard, settle."""
    recorder, rng = Recorder(path, slot=3, incarnation=7), random.Random(os.getpid())
    stepped = opened = shipped = chunks = discarded = dropped = seq = 0
    settled, batches = Settled(), dict[int, HeldBatch]()
    while True:
        for _ in range(rng.randrange(1, 100)):
            stepped, opened = stepped + 8, opened + 8
            recorder.step(stepped, opened, stepped, {Discard.ENV_EXCEPTION: discarded})
        batch = None
        match rng.randrange(8):
            case 0:
                opened, discarded = opened - 3, discarded + 3
            case 1:
                opened, dropped = opened - 5, dropped + 5
            case 2 | 3:
                seq, shipped, chunks = seq + 1, shipped + opened, chunks + 2
                batch = batches[seq] = HeldBatch(seq=seq, steps=opened, chunks=2)
                opened = 0
            case 4:
                while settled.seq < seq - rng.randrange(40):
                    done = batches.pop(settled.seq + 1)
                    settled = settled.add((done.steps, done.chunks), {})
                recorder.settled(settled, accepted=seq)
        totals = WorkerTotals(
            seq=seq,
            stepped=stepped,
            open=opened,
            shipped=shipped,
            shipped_chunks=chunks,
            discarded={Discard.ENV_EXCEPTION: discarded},
            dropped={Drop.OVERSIZE: (dropped, 0)},
        )
        recorder.totals(totals, batch)


def _start(path: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _work_forever(path)
    finally:
        os._exit(1)


def _assert_consistent(reading: Reading) -> None:
    t = reading.totals
    assert t.stepped == t.open + sum(t.discarded.values()) + sum(n for n, _ in t.dropped.values()) + t.shipped
    assert [batch.seq for batch in reading.window] == list(range(reading.settled.seq + 1, t.seq + 1))
    unsettled = (sum(b.steps for b in reading.window), sum(b.chunks for b in reading.window))
    committed = reading.settled.committed
    assert (t.shipped, t.shipped_chunks) == (committed[0] + unsettled[0], committed[1] + unsettled[1])
    assert (reading.slot, reading.incarnation) == (3, 7)


def test_a_new_recorder_does_not_truncate_a_live_one_of_the_same_name(tmp_path: Path) -> None:
    """Truncating the file would kill a process that has mapped it."""
    older = Recorder(tmp_path / "a.rec", slot=3, incarnation=7)
    size = os.fstat(mapped := os.open(tmp_path / "a.rec", os.O_RDONLY)).st_size
    newer = Recorder(tmp_path / "a.rec", slot=3, incarnation=8)
    older.step(8, 8, 8, {})
    reading = read_recorder(tmp_path / "a.rec")
    assert reading is not None
    assert (reading.incarnation, reading.totals.stepped) == (8, 0)
    assert os.fstat(mapped).st_size == size
    os.close(mapped)
    older.close()
    newer.close()


@pytest.mark.parametrize(("name", "numbers"), schedules({"kills": KILLS}))
def test_a_kill_at_any_moment_leaves_a_consistent_recorder(name: str, numbers: range, tmp_path: Path) -> None:
    """Real processes, really killed: whatever the moment, the books in the file balance, the window included."""
    rng, moment, progress = random.Random(f"{name} from {numbers.start}"), threading.Event(), 0
    for number in numbers:
        path = tmp_path / f"{number}.rec"
        pid = _start(path)
        try:
            wait_until(
                lambda path=path: (r := read_recorder(path)) is not None and r.totals.seq > 0, what="a first batch"
            )
            moment.wait(rng.uniform(0, 0.005))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        reading = read_recorder(path)
        assert reading is not None
        assert reading.pid == pid
        _assert_consistent(reading)
        progress += reading.totals.seq
        path.unlink()
    assert progress > len(numbers)


def test_a_live_recorder_is_read_as_of_one_commit(tmp_path: Path) -> None:
    pid = _start(tmp_path / "live.rec")
    try:
        wait_until(lambda: read_recorder(tmp_path / "live.rec") is not None)
        for _ in range(1000):
            reading = read_recorder(tmp_path / "live.rec")
            assert reading is not None
            _assert_consistent(reading)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_everything_recorded_is_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.rec", slot=1, incarnation=2)
    totals = WorkerTotals(
        **{name: 10 * i + 2 for i, name in enumerate(COUNTERS)},
        discarded={reason.value: i + 1 for i, reason in enumerate(Discard)},
        dropped={reason.value: (i + 1, i) for i, reason in enumerate(Drop)},
    )
    settled = Settled(seq=1, committed=(40, 3), dropped={reason.value: (i, 1) for i, reason in enumerate(Drop)})
    recorder.totals(totals, HeldBatch(seq=2, steps=50, chunks=3))
    recorder.settled(settled, accepted=2)
    recorder.touch(silence_s=30.0)
    reading = read_recorder(tmp_path / "a.rec")
    recorder.close()
    assert reading is not None
    assert (reading.totals, reading.settled, reading.accepted) == (totals, settled, 2)
    assert reading.window == [HeldBatch(seq=2, steps=50, chunks=3)]
    assert reading.pid == os.getpid()
    assert 29e9 < reading.silent_until_ns - reading.updated_ns < 31e9
    assert read_recorder(tmp_path / "a.rec") == reading, "the file stays after close"


def test_each_counter_has_a_word_of_its_own() -> None:
    """Words 0, 9 to 13 and 15 hold other things, and from 16 to 95 steps stand by reason."""
    words = [row.word for row in COUNTERS.values()]
    assert sorted(words) == sorted(set(words) - {0, 9, 10, 11, 12, 13, 15} - set(range(16, 96)))
    assert max(words) < AREA
    in_old_files = {"seq": 1, "stepped": 2, "open": 3, "shipped": 4, "shipped_chunks": 5, "episodes": 6}
    in_old_files |= {"env_failures": 7, "env_rebuilds": 8, "env_steps": 14}
    assert {name: row.word for name, row in COUNTERS.items()}.items() >= in_old_files.items()


def test_reasons_of_a_newer_peer_are_counted_as_other(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.rec", slot=0, incarnation=1)
    recorder.settled(Settled(seq=2, dropped={"new_a": (3, 1), "new_b": (4, 1), "stale": (1, 1), "other": (9, 2)}), 2)
    reading = read_recorder(tmp_path / "a.rec")
    recorder.close()
    assert reading is not None
    assert reading.settled.dropped == {"stale": (1, 1), "other": (16, 4)}


def test_the_window_ring_holds_the_largest_window(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.rec", slot=0, incarnation=1)
    last, size = 3 * WINDOW + 5, WINDOW - 1
    for seq in range(1, last + 1):
        if seq > size:
            recorder.settled(Settled(seq=seq - size), accepted=seq - 1)
        recorder.totals(WorkerTotals(seq=seq), HeldBatch(seq=seq, steps=seq, chunks=1))
    reading = read_recorder(tmp_path / "a.rec")
    recorder.close()
    assert reading is not None
    assert [(b.seq, b.steps) for b in reading.window] == [(seq, seq) for seq in range(last - size + 1, last + 1)]


@pytest.mark.parametrize("content", [b"", b"HDRC", bytes(26688), b"\xff" * 26688])
def test_a_missing_or_foreign_file_reads_as_none(tmp_path: Path, content: bytes) -> None:
    assert read_recorder(tmp_path / "missing.rec") is None
    (tmp_path / "a.rec").write_bytes(content)
    assert read_recorder(tmp_path / "a.rec") is None


def test_a_recorder_with_impossible_numbers_reads_as_none(tmp_path: Path) -> None:
    Recorder(tmp_path / "a.rec", slot=0, incarnation=1).close()
    content = bytearray((tmp_path / "a.rec").read_bytes())
    content[64:2112] = b"\xff" * 2048
    (tmp_path / "a.rec").write_bytes(content)
    assert read_recorder(tmp_path / "a.rec") is None


def test_a_folder_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="--run-dir"):
        Recorder(tmp_path / "missing" / "a.rec", slot=0, incarnation=1)
