"""Large weights in shared memory: workers map them, pull them where they cannot, and leave no file behind."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from numpy.typing import NDArray

from headrace.broker.files.state_file import Endpoints
from headrace.broker.ports.weights_relay import WeightsRelay
from headrace.learner_stub import WeightPublisher
from headrace.learner_stub.link.broker_link import BrokerLink
from headrace.learner_stub.publishing.broker_weights import BrokerWeights
from headrace.schemas.basics.bounds import Version
from headrace.schemas.errors import EncodeError, RefusedError
from headrace.schemas.frames import wire
from headrace.schemas.frames.wire import Buffer, MessageKind, decode, encode
from headrace.schemas.messages import WeightsAck, WeightsHeader, read, shared_weights, weights_file
from headrace.schemas.messages.shared_weights import SharedWeights, remove_unused_weights
from headrace.schemas.messages.weights import encode_weights, weights_digest
from headrace.workers.fleet.weights import OTHERS_PULL_S, WeightsReceiver
from headrace.workers.policy.module_weights import write_weights
from support.pipeline.delivery import FLEET, BrokerThread, Feeder, StartBroker, StartFeeder, blocked
from support.waiting import TIMEOUT_S, wait_until

LARGE = 700_000


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the machine's memory. There is none on disk."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_weights, "DISK", tmp_path / "disk")
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


def state(value: float, size: int = LARGE) -> dict[str, NDArray[Any]]:
    return {"w": np.full(size, value, np.float32), "b": np.array([value, 1.0])}


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


@pytest.mark.parametrize("has_room", [True, False])
def test_weights_of_100_kb_are_mapped_on_the_brokers_machine_and_sent_whole_to_others(
    start_broker: StartBroker,
    stack: ExitStack,
    pulls: list[int],
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_room: bool,
) -> None:
    """Without room in memory, all workers get them whole."""
    if not has_room:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4_096))
    monkeypatch.setattr("headrace.workers.fleet.weights.BROADCAST_S", 1000.0)  # the broadcast comes in time
    broker, came = start_broker(), Counter[tuple[int, bool]]()
    here, elsewhere = (Feeder(broker.endpoints.worker, slot=slot) for slot in range(2))
    receive = WeightsReceiver.receive

    def counted(receiver: WeightsReceiver, message: wire.WireMessage, now: float) -> None:
        came[[here.weights, elsewhere.weights].index(receiver), bool(message.arrays)] += 1
        receive(receiver, message, now)

    monkeypatch.setattr(WeightsReceiver, "receive", counted)
    for feeder in (sharing(here), elsewhere):
        stack.enter_context(feeder)
        wait_until(lambda f=feeder: f.link._subscriber is not None, "a subscription")  # type: ignore[misc]
    with WeightPublisher(broker.endpoints.learner) as publisher:
        for value in (1.0, 2.0):
            given = {"w": np.full(25_000, value, np.float32)}
            publisher.publish(given)
            for feeder in (here, elsewhere):
                assert taken(feeder, (1, int(value)))["w"].tobytes() == given["w"].tobytes()
    assert pulls == []
    assert {which for which, count in came.items() if count} == {(0, not has_room), (1, True)}


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
    assert [record.levelno for record in warned].count(logging.WARNING) <= 3, "each process once"


def test_a_failed_write_leaves_no_partial_file(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, frames: list[Buffer]) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_weights, "write_frames", full)
    shared = SharedWeights(FLEET)
    assert not shared.write(*version_of(1, 1.0))
    assert files_in(memory) == ["users"]
    shared.close()


# -- on a machine without the broker ----------------------------------------------------------------------------------


@dataclass
class Elsewhere:
    """A broker and its publisher on a machine with memory of its own."""

    endpoints: Endpoints
    publisher: WeightPublisher


@pytest.fixture
def elsewhere(start_broker: StartBroker, memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    """The pull of one worker is all that this machine has."""
    for wait in ("BROADCAST_S", "OTHERS_PULL_S", "PULL_RETRY_S"):  # a busy machine is slow, and pulls are counted
        monkeypatch.setattr(f"headrace.workers.fleet.weights.{wait}", 1000.0)
    (memory / "elsewhere").mkdir()
    monkeypatch.setattr(shared_weights, "MEMORY", memory / "elsewhere")
    broker = start_broker()
    with WeightPublisher(broker.endpoints.learner) as publisher:
        (memory / "here").mkdir()
        monkeypatch.setattr(shared_weights, "MEMORY", memory / "here")
        yield Elsewhere(broker.endpoints, publisher)


def test_one_worker_pulls_the_weights_for_all_workers_of_its_machine(
    elsewhere: Elsewhere, start_feeder: StartFeeder, pulls: list[int], memory: Path
) -> None:
    feeders = [sharing(start_feeder(elsewhere.endpoints.worker, slot=slot)) for slot in range(4)]
    wait_until(lambda: all(feeder.link._subscriber is not None for feeder in feeders), "subscriptions")
    for value in (1.0, 2.0, 3.0):
        before = len(pulls)
        elsewhere.publisher.publish(state(value))
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
    elsewhere: Elsewhere,
    start_feeder: StartFeeder,
    pulls: list[int],
    memory: Path,
) -> None:
    feeders = [sharing(start_feeder(elsewhere.endpoints.worker, slot=slot)) for slot in range(2)]
    claiming = [sys.executable, "-c", _CLAIM, str(memory / "here")]
    with subprocess.Popen(claiming, stdout=subprocess.PIPE) as puller, ExitStack() as stack:
        stack.callback(puller.kill)
        assert puller.stdout is not None
        assert puller.stdout.readline() == b"claimed\n"
        elsewhere.publisher.publish(state(1.0))
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


def test_a_worker_waits_for_a_slow_puller_as_long_as_pieces_come() -> None:
    """A gigabyte takes longer than `OTHERS_PULL_S` over most links."""
    slow = SharedWeights(FLEET)
    assert slow.claim()
    receiver, now = WeightsReceiver(FLEET, SharedWeights(FLEET)), 0.0
    header = WeightsHeader(fleet_id=FLEET, version=(1, 1), digest=digest_of(1.0))
    receiver.receive(decode(encode(MessageKind.WEIGHTS, header.model_dump())), now)
    file = slow.arriving((1, 1), [100])
    assert file is not None
    for offset in range(3):
        file.put(0, offset, b"x")
        os.utime(slow._arriving or "", ns=(offset + 1, offset + 1))  # the clock of files is a coarse one
        now += OTHERS_PULL_S
        assert receiver.requests(now) == []
    assert receiver.requests(now + OTHERS_PULL_S / 2) == []
    assert [pull.offset for pull in receiver.requests(now + OTHERS_PULL_S)] == [0]
    file.close()


def test_a_worker_stops_waiting_for_a_stalled_puller_although_newer_versions_are_announced() -> None:
    still = SharedWeights(FLEET)
    assert still.claim()
    receiver = WeightsReceiver(FLEET, SharedWeights(FLEET))
    asked, now = list[int](), 0.0
    for seq in range(1, 10):
        header = WeightsHeader(fleet_id=FLEET, version=(1, seq), digest=digest_of(1.0))
        receiver.receive(decode(encode(MessageKind.WEIGHTS, header.model_dump())), now)
        asked += [pull.offset for pull in receiver.requests(now)]
        now += OTHERS_PULL_S * 0.4
    assert asked[:1] == [0]


def test_a_worker_that_pulls_to_its_own_memory_lets_the_others_pull_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1_000, f_frsize=4_096))
    relay, receiver, other = WeightsRelay(), WeightsReceiver(FLEET, SharedWeights(FLEET)), SharedWeights(FLEET)
    frames = encode_weights(FLEET, (1, 1), state(1.0), digest_of(1.0))
    relay.offer(read(WeightsHeader, decode(frames).header), frames)
    receiver.receive(decode(relay.broadcast), 0.0)
    assert not other.claim()
    (first,) = receiver.requests(0.0)
    receiver.receive(decode(relay.part(first)), 0.0)
    assert receiver.pulling
    assert other.claim()


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


def lie_of_sizes(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"\xff" * 8 + content[16:])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [cut, flip, open_to_others, link, lie_of_sizes, empty, folder])
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
    found = shared.read((1, 1), digest_of(1.0))
    assert shared.write(*version_of(2, 2.0))
    assert found is not None
    assert same(dict(found[1]), 1.0)
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


# -- on disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on disk, beside memory that has room for small versions only, as in a container."""
    folder, statvfs = memory.with_name("disk"), os.statvfs
    folder.mkdir()

    def little(path: Path) -> Any:
        return SimpleNamespace(f_bavail=100, f_frsize=4_096) if path.is_relative_to(memory) else statvfs(path)

    monkeypatch.setattr(os, "statvfs", little)
    return folder


def test_a_version_for_which_memory_has_no_room_lies_on_disk_with_one_warning(
    start_broker: StartBroker,
    start_feeder: StartFeeder,
    pulls: list[int],
    memory: Path,
    disk: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = start_broker()
    feeders = [sharing(start_feeder(broker.endpoints.worker, slot=slot)) for slot in range(2)]
    wait_until(lambda: all(feeder.link._subscriber is not None for feeder in feeders), "subscriptions")
    with WeightPublisher(broker.endpoints.learner) as publisher:
        for value in (1.0, 2.0):
            publisher.publish(state(value))
            assert all(same(taken(feeder, (1, int(value))), value) for feeder in feeders)
        assert pulls == []
        assert files_in(disk) == [f"1-2-{digest_of(2.0)}", "users"]
        publisher.publish({"w": np.full(25_000, 3.0, np.float32)})
        assert all(taken(feeder, (1, 3))["w"][0] == 3.0 for feeder in feeders)
        assert files_in(memory)[0].startswith("1-3-"), "small ones lie in memory"
        wait_until(lambda: files_in(disk) == ["users"], "the older version to go")
    (warned,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert re.search(r"2800016 bytes are more than half of the 409600 .*they lie in files in .*disk", warned)


def test_one_worker_pulls_to_disk_for_all_where_memory_has_no_room(memory: Path, disk: Path) -> None:
    relay, receivers = WeightsRelay(), [WeightsReceiver(FLEET, SharedWeights(FLEET)) for _ in range(2)]
    header, frames = version_of(1, 1.0)
    relay.offer(header, frames)
    for receiver in receivers:
        receiver.receive(decode(relay.broadcast), 0.0)
    for now in range(9):
        for pull in receivers[0].requests(now):
            receivers[0].receive(decode(relay.part(pull)), now)
    assert receivers[1].requests(9.0) == []
    assert [receiver.newest for receiver in receivers] == [(1, 1), (1, 1)]
    assert files_in(disk) == [f"1-1-{digest_of(1.0)}", "users"]
    for receiver in receivers:
        assert receiver._shared is not None
        receiver._shared.close()
    assert list(disk.iterdir()) == []


def test_a_full_disk_is_told_in_one_sentence_and_leaves_no_file(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = weights_file._write_at

    def full(descriptor: int, part: Buffer, start: int) -> None:
        if len(part) > 1_000:
            raise OSError(28, "No space left on device")
        write(descriptor, part, start)

    monkeypatch.setattr(weights_file, "_write_at", full)
    shared = SharedWeights(FLEET)
    for seq in (1, 2):
        assert not shared.write(*version_of(seq, 1.0))
        assert shared.write_arrays((1, seq), state(1.0)) is None
    assert files_in(disk) == ["users"]
    (warned,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert re.search(r"half of .*disk.*: \[Errno 28\] No space left on device\); they go over sockets", warned)
    shared.close()


def test_memory_that_other_processes_have_taken_is_no_room(
    memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder in memory may claim to have room of its own."""
    monkeypatch.undo()
    monkeypatch.setattr(shared_weights, "MEMORY", memory)
    monkeypatch.setattr(shared_weights, "DISK", disk)
    monkeypatch.setattr(shared_weights, "free_memory", lambda: 5_600_000)
    shared = SharedWeights(FLEET)
    assert shared.write(*version_of(1, 1.0))
    assert shared.write_arrays((1, 2), state(1.0, 600_000)) is not None
    assert [len(files_in(place)) for place in (memory, disk)] == [2, 2]
    shared.close()


# -- what is left -----------------------------------------------------------------------------------------------------


def test_the_scratch_folders_of_workers_on_disk_are_left_alone(tmp_path: Path) -> None:
    """A worker of a cluster has its recorders in headrace-UID/FLEET of the same folder for temporary files."""
    scratch = tmp_path / "disk" / f"headrace-{os.geteuid()}" / "fleet" / "recorders"
    scratch.mkdir(0o700, parents=True)
    scratch.parent.parent.chmod(0o700)
    shared = SharedWeights(FLEET)
    assert shared.write(*version_of(1, 1.0))
    shared.close()
    remove_unused_weights()
    assert scratch.is_dir()


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
from headrace.schemas.messages import WeightsHeader, read, shared_weights, weights_file
from headrace.schemas.messages.weights import encode_weights
from headrace.schemas.frames.wire import decode
shared_weights.MEMORY = Path(sys.argv[1])
shared = shared_weights.SharedWeights("fleet")
for seq in (1, 2):
    frames = encode_weights("fleet", (1, seq), {"w": np.full(700_000, seq, np.float32)})
    if seq == 2:
        put = weights_file.NewFile.put
        def cut(file, frame, offset, part):
            put(file, frame, offset, part)
            if len(part) > 1_000_000: os.kill(os.getpid(), signal.SIGKILL)
        weights_file.NewFile.put = cut
    assert shared.write(read(WeightsHeader, decode(frames).header), frames)
"""


def test_a_killed_writer_blocks_no_other_writer_and_its_partial_file_is_removed(memory: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(memory)], timeout=TIMEOUT_S, check=False)
    assert ended.returncode == -signal.SIGKILL
    half = [name for name in files_in(memory) if name.startswith(".1-2.")]
    assert len(half) == 1, "it was writing"
    shared = SharedWeights(FLEET)
    assert shared.write(*version_of(3, 3.0))
    assert half[0] not in files_in(memory)
    found = shared.read((1, 3), digest_of(3.0))
    assert found is not None
    assert same(dict(found[1]), 3.0)
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


@pytest.mark.parametrize("level", ["root", "folder"])
def test_a_folder_that_goes_while_a_process_enters_is_made_again(
    memory: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Its last user removes it just after the kernel has said that it exists."""
    shared = SharedWeights(FLEET)
    place = {"root": shared._memory.root, "folder": shared._memory.path}[level]
    place.mkdir(mode=0o700, parents=True)
    shared._memory.root.chmod(0o700)
    mkdir = os.mkdir

    def remove_then_fail(path: Path, mode: int = 0o777) -> None:
        if path == place and place.exists():
            place.rmdir()
            raise FileExistsError(17, "File exists")
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", remove_then_fail)
    assert shared.claim()
    assert shared._memory.path.exists()
    shared.close()


def test_a_folder_that_is_being_removed_keeps_no_process_from_sharing(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal of a gigabyte takes a fifth of a second."""
    old, new, remove = SharedWeights(FLEET), SharedWeights(FLEET), shutil.rmtree
    entered: list[bool] = []

    def slow(path: Path, **options: Any) -> None:
        entered.append(new.write(*version_of(2, 2.0)))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    assert old.write(*version_of(1, 1.0))
    old.close()
    assert entered == [True]
    assert new.read((1, 2), digest_of(2.0)) is not None
    monkeypatch.undo()
    new.close()


def test_a_folder_in_use_is_not_removed(memory: Path) -> None:
    shared = SharedWeights(FLEET)
    assert shared.write(*version_of(1, 1.0))
    remove_unused_weights()
    assert shared.read((1, 1), digest_of(1.0)) is not None
    shared.close()


# -- a publisher on the broker's machine ------------------------------------------------------------------------------


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each version that publishers sent, whether it was an announcement alone."""
    kinds: list[bool] = []
    message = BrokerWeights._message

    def noted(weights: BrokerWeights, *arrays: Any) -> list[Buffer]:
        frames = message(weights, *arrays)
        kinds.append(len(frames) == 2)
        return frames

    monkeypatch.setattr(BrokerWeights, "_message", noted)
    return kinds


def when_in_place(monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]) -> None:
    """Harm each version as soon as its file is in place, before its announcement."""
    replace = Path.replace

    def harmed(path: Path, target: Path) -> Path:
        done = replace(path, target)
        if re.match(r"1-\d", target.name):
            harm(target)
        return done

    monkeypatch.setattr(Path, "replace", harmed)


def flip_in_place(path: Path) -> None:
    """Change a byte of the file that others have mapped."""
    with path.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"\xff")


def arrived(publisher: WeightPublisher) -> None:
    def pumped() -> bool:
        publisher.pump()
        return publisher.acknowledged == (publisher.epoch, publisher.seq)

    wait_until(pumped, "the broker's acknowledgement")


def test_a_publisher_on_the_brokers_machine_sends_an_announcement_alone(
    broker: BrokerThread, publisher: WeightPublisher, announced: list[bool], memory: Path
) -> None:
    for value in (1.0, 2.0):
        publisher.publish(state(value))
        arrived(publisher)
    assert announced == [True, True]
    assert files_in(memory) == [f"1-2-{digest_of(2.0)}", "users"]
    held = broker.ask(lambda own: decode(own.relay.frames).arrays)
    assert same(held, 2.0)


def test_published_weights_do_not_change_with_the_learners_tensors(
    broker: BrokerThread, publisher: WeightPublisher
) -> None:
    given = state(1.0)
    publisher.publish(given)
    given["w"][:] = 7.0
    arrived(publisher)
    assert same(broker.ask(lambda own: decode(own.relay.frames).arrays), 1.0)


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_weights_that_the_broker_does_not_find_in_memory_are_sent_whole(
    start_broker: StartBroker,
    announced: list[bool],
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_elsewhere: bool,
) -> None:
    broker = start_broker()
    if is_elsewhere:  # as where the broker runs in a container whose port this machine has
        (memory / "here").mkdir()
        monkeypatch.setattr(shared_weights, "MEMORY", memory / "here")
    else:  # as where its file is removed
        when_in_place(monkeypatch, Path.unlink)
    with WeightPublisher(broker.endpoints.learner) as publisher:
        for value in (1.0, 2.0):
            publisher.publish(state(value))
            arrived(publisher)
            assert same(broker.ask(lambda own: decode(own.relay.frames).arrays), value)
    assert announced == [True, False, False]


def test_a_published_file_that_is_damaged_is_refused_and_the_publisher_raises(
    broker: BrokerThread, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(state(1.0))
    arrived(publisher)
    when_in_place(monkeypatch, flip_in_place)
    publisher.publish(state(2.0))
    with pytest.raises(RefusedError, match="do not match their digest"):  # the file was the publisher's copy too
        arrived(publisher)
    assert same(broker.ask(lambda own: decode(own.relay.frames).arrays), 1.0)


def test_a_publisher_that_closes_at_once_loses_no_version(
    start_broker: StartBroker, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    for seq, folder in ((1, memory), (2, memory / "here")):
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(shared_weights, "MEMORY", folder)
        with WeightPublisher(broker.endpoints.learner) as publisher:
            publisher.publish(state(float(seq)))
        wait_until(lambda s=seq: broker.ask(lambda own: own.relay.version)[1] == s, "the version")  # type: ignore[misc]


def test_a_publisher_that_closes_while_the_broker_is_busy_loses_no_version(
    start_broker: StartBroker, memory: Path
) -> None:
    broker = start_broker()
    publisher = WeightPublisher(broker.endpoints.learner)
    with blocked(broker):
        publisher.publish(state(1.0))
        publisher.close()
    wait_until(lambda: broker.ask(lambda own: own.relay.version)[1] == 1, "the version")
    broker.stop()
    assert list(memory.iterdir()) == [], "the broker leaves last"


def test_a_restarted_broker_maps_the_version_of_before(start_broker: StartBroker, announced: list[bool]) -> None:
    first = start_broker()
    with WeightPublisher(first.endpoints.learner) as publisher:
        publisher.publish(state(1.0))
        arrived(publisher)
        first.stop()
        second = start_broker()

        def mapped() -> bool:
            publisher.pump()
            return second.ask(lambda own: own.relay.version) == (publisher.epoch, 1)

        wait_until(mapped, "the version at the new broker")
        assert same(second.ask(lambda own: decode(own.relay.frames).arrays), 1.0)
    assert all(announced)


def test_announcements_of_another_file_or_of_none_change_nothing(
    broker: BrokerThread, publisher: WeightPublisher, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(state(1.0))
    arrived(publisher)
    link, before = publisher._brokers[0].link, file_of(memory)
    os.link(before, before.with_name(f"1-2-{digest_of(2.0)}"))
    answers: list[WeightsAck] = []
    monkeypatch.setattr(publisher._brokers[0], "_on_ack", answers.append)
    digests = (digest_of(2.0), "../../etc/passwd", "f" * 32)
    for digest in digests:
        header = WeightsHeader(fleet_id=FLEET, version=(1, 2), digest=digest)
        assert link.send(encode(MessageKind.WEIGHTS, header.model_dump()))
    wait_until(lambda: publisher.pump() or len(answers) == len(digests), "an answer to each")
    assert [answer.is_held for answer in answers] == [False] * len(digests)
    assert broker.ask(lambda own: own.relay.version) == (1, 1)


def test_a_written_version_is_the_message_that_would_be_sent() -> None:
    shared = SharedWeights(FLEET)
    given = {"z": np.ones((300, 300)), "a": np.array(1.5), "empty": np.zeros((0, 3)), "t": np.ones((200, 200)).T}
    given["big"] = np.arange(20_000, dtype=">f4")
    given |= {f"layer {n}": np.full(1 << 13, float(n)) for n in range(70)}  # they fill all frames of a message
    written = shared.write_arrays((1, 1), given)
    assert written is not None
    views, digest = written
    little = {**given, "big": given["big"].astype("<f4")}
    assert digest == weights_digest(little)
    found = shared.read((1, 1), digest)
    assert found is not None
    for arrays in (views, found[1]):
        assert {n: (a.dtype.str, a.shape, a.tobytes()) for n, a in arrays.items()} == {
            n: (a.dtype.str, a.shape, a.tobytes()) for n, a in little.items()
        }
    shared.close()


def test_versions_that_the_broker_may_not_have_read_stay(
    broker: BrokerThread, publisher: WeightPublisher, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher removes what is older than the last two, where the broker does not."""
    monkeypatch.setattr(SharedWeights, "read", lambda *_: None)
    monkeypatch.setattr(BrokerWeights, "_on_ack", lambda *_: None)
    for seq in (1, 2, 3, 4):
        publisher.publish(state(float(seq)))
    assert [name[:3] for name in files_in(memory)] == ["1-3", "1-4", "use"]


def test_the_broker_removes_the_versions_before_the_one_that_it_has_read(
    broker: BrokerThread, publisher: WeightPublisher, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a publisher looks into the folder only if an acknowledgement is missing."""
    publisher.publish(state(1.0))
    arrived(publisher)
    removed: list[Version] = []
    remove = SharedWeights.remove_older

    def noted(shared: SharedWeights, version: Version) -> None:
        removed.append(version)
        remove(shared, version)

    monkeypatch.setattr(SharedWeights, "remove_older", noted)
    for seq in (2, 3):
        publisher.publish(state(float(seq)))
        arrived(publisher)
        assert files_in(memory) == [f"1-{seq}-{digest_of(float(seq))}", "users"]
    assert removed == [(1, 2), (1, 3)], "once a version"


def test_weights_that_may_not_go_on_the_wire_leave_no_file(
    broker: BrokerThread, publisher: WeightPublisher, memory: Path
) -> None:
    with pytest.raises(EncodeError, match="complex128"):
        publisher.publish({"w": np.zeros(LARGE, complex)})
    assert [name for name in files_in(memory) if name != "users"] == []


_KILLED_PUBLISHER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from headrace.learner_stub import WeightPublisher
from headrace.schemas.messages import shared_weights, weights_file
shared_weights.MEMORY = Path(sys.argv[1])
publisher = WeightPublisher(sys.argv[2])
state = {"w": np.full(700_000, 1, np.float32), "b": np.array([1.0, 1.0])}
publisher.publish(state)
while publisher.acknowledged != (publisher.epoch, 1):
    publisher.pump(0.01)
weights_file.weights_digest = lambda arrays: os.kill(os.getpid(), signal.SIGKILL)
publisher.publish(state)
"""


def test_a_publisher_killed_while_it_writes_changes_nothing_and_the_next_removes_its_file(
    broker: BrokerThread, memory: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED_PUBLISHER, str(memory), broker.endpoints.learner], timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert [name for name in files_in(memory) if name.startswith(".1-2.")], "it was writing"
    assert same(broker.ask(lambda own: decode(own.relay.frames).arrays), 1.0)
    with WeightPublisher(broker.endpoints.learner) as publisher:
        publisher.publish(state(5.0))
        arrived(publisher)
        assert files_in(memory) == [f"2-1-{digest_of(5.0)}", "users"]


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [25_000, LARGE])
def test_a_version_is_copied_digested_and_sent_once_and_checked_once_by_each_process(
    broker: BrokerThread, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Counts of bytes, where each pass over a version is one."""
    given, counts = state(1.0, size), Counter[str]()
    digest = weights_digest(given)
    nbytes = given["w"].nbytes
    before = publisher.publish(state(0.0, size))
    arrived(publisher)
    checksum, xxh3, write = wire._checksum, xxhash.xxh3_128, weights_file.NewFile.put

    def checked(payload: Sequence[Buffer]) -> int:
        counts["checked"] += sum(map(len, payload)) // nbytes
        return checksum(payload)

    class Digest:
        def __init__(self) -> None:
            self._hasher = xxh3()
            self.hexdigest = self._hasher.hexdigest

        def update(self, part: Any) -> None:
            counts["digested"] += memoryview(part).nbytes
            self._hasher.update(part)

    def written(file: weights_file.NewFile, frame: int, offset: int, part: Buffer) -> None:
        counts["written"] += len(part) // nbytes
        write(file, frame, offset, part)

    def sent(link: BrokerLink, frames: list[Buffer]) -> bool:
        counts["sent"] += sum(map(len, frames)) // 10_000
        return send(link, frames)

    send = BrokerLink.send
    monkeypatch.setattr(wire, "_checksum", checked)
    monkeypatch.setattr(xxhash, "xxh3_128", Digest)
    monkeypatch.setattr(weights_file.NewFile, "put", written)
    monkeypatch.setattr(BrokerLink, "send", sent)
    worker, module = SharedWeights(FLEET), torch.nn.Module()
    for name, array in given.items():
        module.register_buffer(name, torch.zeros(array.shape, dtype=torch.from_numpy(array).dtype))
    tracemalloc.start()
    try:
        assert publisher.publish(given) == before + 1
        arrived(publisher)
        weights = worker.read((1, 2), digest)
        assert weights is not None
        write_weights(module, weights[1])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counts["digested"] //= nbytes  # its parts are smaller than an array
    assert counts == {"checked": 3, "digested": 1, "written": 1, "sent": 0}, (
        "publisher, broker and worker check it once each"
    )
    assert peak < nbytes // 2 or size < LARGE, "no process holds it but in the file and its module"
    worker.close()


def test_many_large_tensors_are_written_to_memory_without_a_copy_between(memory: Path) -> None:
    """A message has too few frames for each to have its own."""
    given = {f"w{n}": np.full(50_000, n, np.float32) for n in range(100)}
    tracemalloc.start()
    try:
        views, digest = weights_file.write_arrays(memory / "file", FLEET, (1, 1), given)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < sum(array.nbytes for array in given.values()) // 4
    assert digest == weights_digest(given) == weights_digest(views)


@pytest.mark.parametrize("is_there", [True, False])
def test_announced_weights_without_a_shared_file_are_pulled_at_once(memory: Path, *, is_there: bool) -> None:
    if not is_there:
        memory.rmdir()
    receiver = WeightsReceiver(FLEET, SharedWeights(FLEET))
    header = WeightsHeader(fleet_id=FLEET, version=(1, 1), digest=digest_of(1.0))
    receiver.receive(decode(encode(MessageKind.WEIGHTS, header.model_dump())), 1.0)
    assert [pull.offset for pull in receiver.requests(1.0)] == [0]
