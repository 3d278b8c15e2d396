"""Large weights in shared memory: workers map them, pull them where they cannot, and leave no file behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.broker.weights_relay import WeightsRelay
from headrace.learner_stub import WeightPublisher
from headrace.schemas.basics.bounds import Version
from headrace.schemas.frames.wire import Buffer, MessageKind, decode, encode
from headrace.schemas.messages import WeightsHeader, read, shared_weights
from headrace.schemas.messages.shared_weights import SharedWeights, remove_unused_weights
from headrace.schemas.messages.weights import encode_weights, weights_digest
from headrace.workers.fleet.weights import OTHERS_PULL_S, WeightsReceiver
from support.pipeline.delivery import FLEET, BrokerThread, Feeder, StartBroker, StartFeeder
from support.waiting import TIMEOUT_S, wait_until

LARGE = 700_000


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the machine's memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_weights, "MEMORY", folder)
    return folder


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of pieces that brokers were asked for."""
    offsets: list[int] = []
    part = WeightsRelay.part

    def counted(relay: WeightsRelay, pull: Any) -> list[Buffer]:
        offsets.append(pull.offset)
        return part(relay, pull)

    monkeypatch.setattr(WeightsRelay, "part", counted)
    return offsets


def state(value: float) -> dict[str, NDArray[Any]]:
    return {"w": np.full(LARGE, value, np.float32), "b": np.array([value, 1.0])}


def version_of(seq: int, value: float, fleet_id: str = FLEET) -> tuple[WeightsHeader, list[Buffer]]:
    frames = encode_weights(fleet_id, (1, seq), state(value))
    return read(WeightsHeader, decode(frames).header), frames


def digest_of(value: float) -> str:
    return weights_digest(state(value))


def files_in(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.rglob("*") if path.is_file())


def file_of(memory: Path) -> Path:
    (path,) = (path for path in memory.rglob("1-*"))
    return path


def sharing(feeder: Feeder) -> Feeder:
    """A feeder that looks for weights in this machine's memory, as a worker does."""
    feeder.weights._shared = SharedWeights(FLEET)
    return feeder


def taken(feeder: Feeder, version: Version) -> dict[str, NDArray[Any]]:
    wait_until(lambda: feeder.weights.newest == version, f"weights {version}")
    newest = wait_until(feeder.weights.take, f"the arrays of weights {version}")
    assert newest is not None
    return dict(newest.arrays)


def same(arrays: dict[str, NDArray[Any]], value: float) -> bool:
    told = state(value)
    return arrays.keys() == told.keys() and all(arrays[n].tobytes() == told[n].tobytes() for n in told)


def test_workers_of_the_brokers_machine_map_large_weights_and_pull_nothing(
    broker: BrokerThread,
    publisher: WeightPublisher,
    start_feeder: StartFeeder,
    pulls: list[int],
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.workers.fleet.weights.BROADCAST_S", 1000.0)  # the broadcast comes in time
    feeders = [sharing(start_feeder(broker.endpoints.worker, slot=slot)) for slot in range(3)]
    wait_until(lambda: all(feeder.session.welcome for feeder in feeders), "welcomes")
    for feeder in feeders:
        wait_until(lambda f=feeder: f.link._subscriber is not None, "a subscription")  # type: ignore[misc]
    publisher.publish(state(1.0))
    assert all(same(taken(feeder, (1, 1)), 1.0) for feeder in feeders)
    first = file_of(memory)
    assert (first.stat().st_mode & 0o777, first.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    publisher.publish(state(2.0))
    assert all(same(taken(feeder, (1, 2)), 2.0) for feeder in feeders)
    assert pulls == []
    assert files_in(memory) == [f"1-2-{digest_of(2.0)}", "users"], "one version takes memory"


def test_a_worker_that_cannot_map_the_weights_pulls_them(
    broker: BrokerThread, publisher: WeightPublisher, start_feeder: StartFeeder, pulls: list[int], memory: Path
) -> None:
    mapping, pulling = (start_feeder(broker.endpoints.worker, slot=slot) for slot in range(2))
    sharing(mapping)
    wait_until(lambda: mapping.session.welcome and pulling.session.welcome, "welcomes")
    publisher.publish(state(3.0))
    assert same(taken(mapping, (1, 1)), 3.0)
    assert same(taken(pulling, (1, 1)), 3.0)
    assert pulls


def test_large_weights_are_pulled_and_not_shared_when_memory_has_no_room(
    start_broker: StartBroker,
    start_feeder: StartFeeder,
    pulls: list[int],
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1_000, f_frsize=4_096))
    broker = start_broker()
    feeder = sharing(start_feeder(broker.endpoints.worker))
    with WeightPublisher(broker.endpoints.learner) as publisher:
        for value in (1.0, 2.0):
            publisher.publish(state(value))
            assert same(taken(feeder, (1, int(value))), value)
    assert pulls
    assert files_in(memory) == ["puller", "users"]
    warned = [record for record in caplog.records if "more than half" in record.message]
    assert [record.levelno for record in warned].count(logging.WARNING) <= 2, "the broker and the worker, once each"


def test_a_failed_write_leaves_no_partial_file(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, frames: list[Buffer]) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_weights, "_write", full)
    shared = SharedWeights(FLEET)
    assert not shared.write(*version_of(1, 1.0))
    assert files_in(memory) == ["users"]
    shared.close()


# -- on a machine without the broker ----------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(start_broker: StartBroker, memory: Path, monkeypatch: pytest.MonkeyPatch) -> BrokerThread:
    """A broker on a machine with memory of its own. The pull of one worker is all that this machine has."""
    for wait in ("BROADCAST_S", "OTHERS_PULL_S", "PULL_RETRY_S"):  # a busy machine is slow, and pulls are counted
        monkeypatch.setattr(f"headrace.workers.fleet.weights.{wait}", 1000.0)
    (memory / "elsewhere").mkdir()
    monkeypatch.setattr(shared_weights, "MEMORY", memory / "elsewhere")
    broker = start_broker()
    (memory / "here").mkdir()
    monkeypatch.setattr(shared_weights, "MEMORY", memory / "here")
    return broker


def test_one_worker_pulls_the_weights_for_all_workers_of_its_machine(
    elsewhere: BrokerThread, start_feeder: StartFeeder, pulls: list[int], memory: Path
) -> None:
    feeders = [sharing(start_feeder(elsewhere.endpoints.worker, slot=slot)) for slot in range(4)]
    wait_until(lambda: all(feeder.link._subscriber is not None for feeder in feeders), "subscriptions")
    with WeightPublisher(elsewhere.endpoints.learner) as publisher:
        for value in (1.0, 2.0, 3.0):
            before = len(pulls)
            publisher.publish(state(value))
            assert all(same(taken(feeder, (1, int(value))), value) for feeder in feeders)
            assert sorted(pulls[before:]) == [0, 1 << 20, 2 << 20]
    assert [name for name in files_in(memory / "here") if name[0] == "1"] == [f"1-3-{digest_of(3.0)}"]


_CLAIM = """
import sys, time
from pathlib import Path
from headrace.schemas.messages import shared_weights
shared_weights.MEMORY = Path(sys.argv[1])
shared = shared_weights.SharedWeights("fleet")
assert shared.claim()
print("claimed", flush=True)
time.sleep(1000)
"""


def test_another_worker_pulls_after_the_pulling_process_is_killed(
    elsewhere: BrokerThread,
    start_feeder: StartFeeder,
    pulls: list[int],
    memory: Path,
) -> None:
    feeders = [sharing(start_feeder(elsewhere.endpoints.worker, slot=slot)) for slot in range(2)]
    with (
        subprocess.Popen([sys.executable, "-c", _CLAIM, str(memory / "here")], stdout=subprocess.PIPE) as puller,
        WeightPublisher(elsewhere.endpoints.learner) as publisher,
    ):
        assert puller.stdout is not None
        assert puller.stdout.readline() == b"claimed\n"
        publisher.publish(state(1.0))
        wait_until(lambda: all(feeder.weights._sought is not None for feeder in feeders), "both to wait")
        assert pulls == []
        puller.kill()
        assert all(same(taken(feeder, (1, 1)), 1.0) for feeder in feeders)
    assert sorted(pulls) == [0, 1 << 20, 2 << 20]


def test_a_worker_stops_waiting_for_a_stalled_puller_and_pulls_itself() -> None:
    still = SharedWeights(FLEET)
    assert still.claim()
    receiver = WeightsReceiver(FLEET, SharedWeights(FLEET))
    header = WeightsHeader(fleet_id=FLEET, version=(1, 1), digest=digest_of(1.0))
    receiver.hear_of((1, 1), 0.0)
    receiver.receive(decode(encode(MessageKind.WEIGHTS, header.model_dump())), 0.1)
    assert receiver.requests(0.1 + OTHERS_PULL_S / 2) == []
    assert [pull.offset for pull in receiver.requests(0.1 + OTHERS_PULL_S)] == [0]


def test_a_released_claim_is_free_even_if_a_forked_child_has_a_copy() -> None:
    first, second = SharedWeights(FLEET), SharedWeights(FLEET)
    assert first.claim()
    kept = os.dup(first._claim or 0)  # what a fork does to it
    assert not second.claim()
    first.release()
    assert second.claim()
    os.close(kept)


def test_weights_with_a_wrong_digest_are_not_shared(memory: Path) -> None:
    receiver, other = WeightsReceiver(FLEET, SharedWeights(FLEET)), SharedWeights(FLEET)
    frames = encode_weights(FLEET, (1, 1), state(1.0), digest_of(2.0))
    relay = WeightsRelay()
    relay.offer(read(WeightsHeader, decode(frames).header), frames)
    receiver.receive(decode(relay.broadcast), 0.0)
    while asked := receiver.requests(0.0):
        for pull in asked:
            receiver.receive(decode(relay.part(pull)), 0.0)
    assert receiver.newest == (0, 0)
    assert other.read((1, 1), digest_of(2.0)) is None
    assert "users" in files_in(memory)
    assert not [name for name in files_in(memory) if name[0] == "1"]


# -- files that are not what they should be ---------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def open_to_others(path: Path) -> None:
    path.chmod(0o644)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def lie_of_frames(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def lie_of_sizes(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"\xff" * 8 + content[16:])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [cut, flip, open_to_others, link, lie_of_frames, lie_of_sizes, empty, folder])
def test_a_shared_file_that_is_damaged_or_open_to_others_is_refused(
    memory: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = SharedWeights(FLEET), SharedWeights(FLEET)
    assert writer.write(*version_of(1, 1.0))
    assert reader.read((1, 1), digest_of(1.0)) is not None
    harm(file_of(memory))
    for _ in range(2):
        assert reader.read((1, 1), digest_of(1.0)) is None
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1


def test_other_weights_under_the_announced_name_are_refused(memory: Path) -> None:
    shared = SharedWeights(FLEET)
    assert shared.write(*version_of(1, 1.0))
    path = file_of(memory)
    path.rename(path.with_name(f"1-2-{digest_of(2.0)}"))
    assert shared.read((1, 2), digest_of(2.0)) is None
    assert shared.read((1, 2), digest_of(1.0)) is None


def test_a_malformed_digest_is_refused() -> None:
    shared = SharedWeights(FLEET)
    header, frames = version_of(1, 1.0)
    for digest in ("../../../etc/passwd", "", "A" * 32, "0" * 31):
        assert shared.read((1, 1), digest) is None
        assert not shared.write(header.model_copy(update={"digest": digest}), frames)


def test_weights_of_another_fleet_are_not_found() -> None:
    assert SharedWeights(FLEET).write(*version_of(1, 1.0))
    assert SharedWeights("other").read((1, 1), digest_of(1.0)) is None


def test_mapped_weights_stay_unchanged_when_a_newer_version_replaces_them() -> None:
    shared = SharedWeights(FLEET)
    assert shared.write(*version_of(1, 1.0))
    arrays = shared.read((1, 1), digest_of(1.0))
    assert shared.write(*version_of(2, 2.0))
    assert arrays is not None
    assert same(dict(arrays), 1.0)
    assert shared.read((1, 1), digest_of(1.0)) is None


def test_a_folder_that_others_can_use_is_refused_with_one_warning(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (memory / f"headrace-{os.geteuid()}").mkdir()
    (memory / f"headrace-{os.geteuid()}").chmod(0o777)
    shared = SharedWeights(FLEET)
    for _ in range(2):
        assert not shared.write(*version_of(1, 1.0))
        assert shared.read((1, 1), digest_of(1.0)) is None
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert files_in(memory) == []


def test_a_machine_without_shared_memory_logs_one_warning(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory.rmdir()
    shared = SharedWeights(FLEET)
    for _ in range(2):
        assert not shared.write(*version_of(1, 1.0))
    shared.close()
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


# -- what is left -----------------------------------------------------------------------------------------------------


def test_the_last_user_of_the_shared_folder_removes_it(memory: Path) -> None:
    first, second = SharedWeights(FLEET), SharedWeights(FLEET)
    assert first.write(*version_of(1, 1.0))
    assert second.read((1, 1), digest_of(1.0)) is not None
    first.close()
    assert second.read((1, 1), digest_of(1.0)) is not None
    second.close()
    assert list(memory.iterdir()) == []
    assert first.write(*version_of(2, 2.0)), "and who comes later makes it again"
    first.close()
    assert list(memory.iterdir()) == []


_KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from headrace.schemas.messages import shared_weights
from headrace.schemas.messages import WeightsHeader, read
from headrace.schemas.messages.weights import encode_weights
from headrace.schemas.frames.wire import decode
shared_weights.MEMORY = Path(sys.argv[1])
shared = shared_weights.SharedWeights("fleet")
for seq in (1, 2):
    frames = encode_weights("fleet", (1, seq), {"w": np.full(700_000, seq, np.float32)})
    if seq == 2:
        write = os.fdopen
        class Cut:
            def __init__(self, file): self.file = file
            def __enter__(self): return self
            def __exit__(self, *error): pass
            def write(self, part):
                self.file.write(part); self.file.flush()
                if len(part) > 1_000_000: os.kill(os.getpid(), signal.SIGKILL)
        os.fdopen = lambda *args: Cut(write(*args))
    assert shared.write(read(WeightsHeader, decode(frames).header), frames)
"""


def test_a_killed_writer_blocks_no_other_writer_and_its_partial_file_is_removed(memory: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(memory)], timeout=TIMEOUT_S, check=False)
    assert ended.returncode == -signal.SIGKILL
    half = [name for name in files_in(memory) if name.startswith(".1-2-")]
    assert len(half) == 1, "it was writing"
    shared = SharedWeights(FLEET)
    assert shared.write(*version_of(3, 3.0))
    assert half[0] not in files_in(memory)
    assert same(dict(shared.read((1, 3), digest_of(3.0)) or {}), 3.0)
    shared.close()
    assert list(memory.iterdir()) == []


def test_the_next_fleet_or_the_supervisor_removes_files_of_killed_processes(memory: Path) -> None:
    next_fleet = SharedWeights("other")
    for clean in (lambda: next_fleet.write(*version_of(1, 1.0, "other")), remove_unused_weights):
        subprocess.run([sys.executable, "-c", _KILLED, str(memory)], timeout=TIMEOUT_S, check=False)
        (left,) = {path.parent for path in memory.rglob("users")}
        clean()
        next_fleet.close()
        assert not left.exists()


def test_a_folder_in_use_is_not_removed(memory: Path) -> None:
    shared = SharedWeights(FLEET)
    assert shared.write(*version_of(1, 1.0))
    remove_unused_weights()
    assert shared.read((1, 1), digest_of(1.0)) is not None
    shared.close()


@pytest.mark.parametrize("is_there", [True, False])
def test_announced_weights_without_a_shared_file_are_pulled_at_once(memory: Path, *, is_there: bool) -> None:
    if not is_there:
        memory.rmdir()
    receiver = WeightsReceiver(FLEET, SharedWeights(FLEET))
    header = WeightsHeader(fleet_id=FLEET, version=(1, 1), digest=digest_of(1.0))
    receiver.receive(decode(encode(MessageKind.WEIGHTS, header.model_dump())), 1.0)
    assert [pull.offset for pull in receiver.requests(1.0)] == [0]
