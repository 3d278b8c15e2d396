"""Large weights on hosts without the broker: one copy goes to each, is checked, and is found at once."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from headrace.broker.ports.weights_relay import WeightsRelay
from headrace.learner_stub import WeightPublisher
from headrace.schemas.basics.bounds import Version
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import Buffer, MessageKind, decode, encode
from headrace.schemas.messages import WeightsHeader, read, shared_weights
from headrace.schemas.messages.shared_weights import SharedWeights
from headrace.schemas.messages.weights import encode_weights, has_digest, weights_digest
from headrace.schemas.messages.weights_messages import PIECE_BYTES
from headrace.workers.fleet.weights import PULL_RETRY_S, SEEK_S, ArrivingWeights, OwnMemory, WeightsReceiver
from support.fleets.machines import Machines
from support.fleets.two_machines import NoNamespacesError
from support.pipeline.delivery import FLEET, Feeder, StartBroker, StartFeeder
from support.waiting import TIMEOUT_S, wait_until

LARGE = 1_000_000
HOSTS = ("one", "two")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the memory of the worker's host."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_weights, "MEMORY", folder)
    return folder


@pytest.fixture
def machines() -> Iterator[Machines]:
    with ExitStack() as stack:
        try:
            yield stack.enter_context(Machines("head", *HOSTS))
        except NoNamespacesError as error:
            pytest.skip(str(error))


def state(value: float) -> dict[str, NDArray[Any]]:
    return {"w": np.full(LARGE, value, np.float32), "b": np.full(LARGE // 4, value), "c": np.array(value)}


def held(version: Version, value: float) -> WeightsRelay:
    """A broker's relay that has a version."""
    relay, frames = WeightsRelay(), encode_weights(FLEET, version, state(value))
    relay.offer(read(WeightsHeader, decode(frames).header), frames)
    return relay


def pull(receiver: WeightsReceiver, relay: WeightsRelay, pieces: int = 1000, now: float = 0.0) -> None:
    """Give the receiver the pieces that it asks for, so many at most. What it asked beyond them is lost."""
    while pieces > 0 and (asked := receiver.requests(now)):
        for one in asked[:pieces]:
            receiver.receive(decode(relay.part(one)), now)
        pieces -= len(asked)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name not in ("users", "puller"))


# -- over real links --------------------------------------------------------------------------------------------------


@pytest.mark.netns
def test_each_host_gets_one_copy_of_a_version_over_its_link(
    machines: Machines,
    start_broker: StartBroker,
    start_feeder: StartFeeder,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for wait in ("BROADCAST_S", "OTHERS_PULL_S", "PULL_RETRY_S"):  # a busy machine is slow, and bytes are counted
        monkeypatch.setattr(f"headrace.workers.fleet.weights.{wait}", 1000.0)

    def enter(stack: ExitStack, name: str) -> None:
        stack.enter_context(machines.on(name))
        (memory / name).mkdir(exist_ok=True)
        monkeypatch.setattr(shared_weights, "MEMORY", memory / name)

    feeders = list[Feeder]()
    with ExitStack() as stack:
        enter(stack, "head")
        broker = start_broker(host=machines.address("head"), allow_insecure=True)
        publisher = stack.enter_context(WeightPublisher(broker.endpoints.learner))
        for slot in range(6):
            with ExitStack() as host:
                enter(host, HOSTS[slot % 2])
                feeders.append(start_feeder(broker.endpoints.worker, slot=slot))
                feeders[-1].weights._shared = SharedWeights(FLEET)
        wait_until(lambda: all(feeder.link._subscriber is not None for feeder in feeders), "subscriptions")
        before, nbytes = [machines.received_bytes(host) for host in HOSTS], 0
        for seq in (1, 2, 3):
            nbytes += sum(array.nbytes for array in state(seq).values())
            publisher.publish(state(seq))
            for feeder in feeders:
                wait_until(lambda f=feeder, s=seq: f.weights.newest[1] == s, f"version {seq}")  # type: ignore[misc]
        for host, bytes_before in zip(HOSTS, before, strict=True):
            assert 1.0 <= (machines.received_bytes(host) - bytes_before) / nbytes < 1.2


_HALF = """
import sys, time
from pathlib import Path
import numpy as np
from headrace.broker.ports.weights_relay import WeightsRelay
from headrace.schemas.frames.wire import decode
from headrace.schemas.messages import WeightsHeader, read, shared_weights
from headrace.schemas.messages.weights import encode_weights
from headrace.workers.fleet.weights import WeightsReceiver
shared_weights.MEMORY = Path(sys.argv[1])
relay, receiver = WeightsRelay(), WeightsReceiver("fleet", shared_weights.SharedWeights("fleet"))
frames = encode_weights("fleet", (1, 1), {"w": np.ones(1_000_000, np.float32)})
relay.offer(read(WeightsHeader, decode(frames).header), frames)
receiver.receive(decode(relay.broadcast), 0.0)
for _ in range(2):
    receiver.receive(decode(relay.part(receiver.requests(0.0)[0])), 0.0)
print("half", flush=True)
time.sleep(1000)
"""


def test_another_worker_pulls_when_the_pulling_process_is_killed_with_half_a_version(memory: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _HALF, str(memory)], stdout=subprocess.PIPE) as puller:
        assert puller.stdout is not None
        assert puller.stdout.readline() == b"half\n"
        (half,) = files_in(memory)
        assert half == f".1-1.{puller.pid}"
        relay = held((1, 2), 2.0)
        receivers = [WeightsReceiver(FLEET, SharedWeights(FLEET)) for _ in range(3)]
        for receiver in receivers:
            receiver.receive(decode(relay.broadcast), 0.0)
        assert [receiver.requests(1.0) for receiver in receivers] == [[], [], []], "one process pulls for all"
        puller.send_signal(signal.SIGKILL)
        puller.wait(TIMEOUT_S)
    for receiver in receivers:
        pull(receiver, relay)
        assert receiver.newest == (1, 2)
        taken = receiver.take()
        assert taken is not None
        assert taken.arrays["b"][-1] == 2.0
    assert files_in(memory) == [f"1-2-{weights_digest(state(2.0))}"]


# -- the version while it comes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1 << 20])
def test_a_version_is_read_from_pieces_of_any_size_in_any_order_of_arrays(piece_bytes: int) -> None:
    given = {"z": np.arange(30.0), "a": np.array(1.5), "empty": np.zeros((0, 3)), "t": np.ones((5, 4)).T}
    if piece_bytes >= 100:
        given |= {"y": np.arange(40_000.0), "b": np.arange(200_000.0)}
    frames = encode_weights(FLEET, (1, 1), given)
    sizes, blob = [len(frame) for frame in frames], b"".join(frames)
    arriving = ArrivingWeights((1, 1), sizes, OwnMemory(sizes))
    for start in range(0, len(blob), piece_bytes):
        arriving.add(blob[start : start + piece_bytes])
    assert arriving.message is not None
    header, arrays = arriving.message
    assert (header.version, header.digest) == ((1, 1), weights_digest(given))
    assert {n: (a.shape, a.tobytes()) for n, a in arrays.items()} == {
        n: (a.shape, a.tobytes()) for n, a in given.items()
    }
    assert not any(array.flags.writeable for array in arrays.values())


@pytest.mark.parametrize("place", [0.001, 0.3, 0.999])
def test_a_version_with_a_changed_byte_is_refused(place: float) -> None:
    frames = encode_weights(FLEET, (1, 1), state(1.0))
    sizes, blob = [len(frame) for frame in frames], bytearray(b"".join(frames))
    blob[int(place * len(blob))] ^= 1
    arriving = ArrivingWeights((1, 1), sizes, OwnMemory(sizes))
    with pytest.raises(DecodeError, match="checksum"):
        arriving.add(blob)
    assert arriving.message is None


def test_a_digest_is_of_all_bytes_of_an_array() -> None:
    array = np.arange(400_000.0)
    told = b"w\0<f8\0(400000,)\0" + array.tobytes()
    assert weights_digest({"w": array}) == xxhash.xxh3_128_hexdigest(told)
    assert has_digest({"w": array}, hashlib.blake2b(told, digest_size=16).hexdigest()), "of a learner of wire 1.0"


def test_a_version_with_the_digest_of_an_earlier_learner_is_taken() -> None:
    frames = encode_weights(FLEET, (1, 1), state(1.0), weights_digest(state(1.0), hashlib.blake2b(digest_size=16)))
    arriving = ArrivingWeights((1, 1), [len(frame) for frame in frames], OwnMemory([len(frame) for frame in frames]))
    arriving.add(b"".join(frames))
    assert arriving.message is not None


def test_a_version_with_the_digest_of_another_is_refused() -> None:
    frames = encode_weights(FLEET, (1, 1), state(1.0), weights_digest(state(2.0)))
    arriving = ArrivingWeights((1, 1), [len(frame) for frame in frames], OwnMemory([len(frame) for frame in frames]))
    with pytest.raises(DecodeError, match="do not match their digest"):
        arriving.add(b"".join(frames))
    assert arriving.message is None


def test_the_last_piece_leaves_two_pieces_to_hash_and_none_to_copy(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()

    class Counted:
        def __init__(self, plain: Any, name: str) -> None:
            self._plain, self._name = plain, name

        def update(self, part: Any) -> None:
            counts[self._name] += len(part)
            self._plain.update(part)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._plain, name)

    write, digest, checksum, whole = os.pwrite, xxhash.xxh3_128, xxhash.xxh3_64, xxhash.xxh3_64_intdigest

    def written(descriptor: int, part: Buffer, start: int) -> int:
        counts["written"] += len(part)
        return write(descriptor, part, start)

    def hashed_whole(part: Buffer) -> int:
        counts["of the pieces"] += len(part)
        return whole(part)

    relay, receiver = held((1, 1), 1.0), WeightsReceiver(FLEET, SharedWeights(FLEET))
    monkeypatch.setattr(xxhash, "xxh3_128", lambda: Counted(digest(), "digest"))
    monkeypatch.setattr(xxhash, "xxh3_64", lambda: Counted(checksum(), "checksum"))
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", hashed_whole)
    monkeypatch.setattr(os, "pwrite", written)
    receiver.receive(decode(relay.broadcast), 0.0)
    nbytes = sum(map(len, relay.frames))
    pull(receiver, relay, -(-nbytes // PIECE_BYTES) - 1)
    assert receiver.newest == (0, 0)
    before = Counter(counts)
    pull(receiver, relay, now=PULL_RETRY_S)
    assert receiver.newest == (1, 1)
    left = {name: counts[name] - before[name] for name in counts}
    assert left["digest"] <= 2 * PIECE_BYTES
    assert left["checksum"] <= PIECE_BYTES
    assert left["of the pieces"] < 3 * PIECE_BYTES  # the relay's piece, and the receiver's
    assert left["written"] <= PIECE_BYTES
    assert counts["written"] < 1.01 * nbytes


def test_another_message_than_weights_is_refused_at_its_header() -> None:
    frames = encode(MessageKind.BATCH, {}, {"w": np.zeros(LARGE)})
    sizes = [len(frame) for frame in frames]
    arriving = ArrivingWeights((1, 1), sizes, OwnMemory(sizes))
    with pytest.raises(DecodeError, match="BATCH was pulled"):
        arriving.add(b"".join(frames[:2]))


def test_a_file_without_room_is_given_up_and_the_version_pulled_to_own_memory(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def full(descriptor: int, part: Buffer, start: int) -> int:
        if start > 2 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, part, start)

    monkeypatch.setattr(os, "pwrite", full)
    relay, receiver, other = held((1, 1), 1.0), WeightsReceiver(FLEET, SharedWeights(FLEET)), SharedWeights(FLEET)
    receiver.receive(decode(relay.broadcast), 0.0)
    pull(receiver, relay)
    assert receiver.newest == (1, 1)
    assert files_in(memory) == []
    assert other.claim(), "another worker may pull"


def test_a_pull_that_is_replaced_by_a_newer_version_leaves_no_file(memory: Path) -> None:
    receiver = WeightsReceiver(FLEET, SharedWeights(FLEET))
    receiver.receive(decode(held((1, 1), 1.0).broadcast), 0.0)
    pull(receiver, held((1, 1), 1.0), 2)
    assert files_in(memory) == [f".1-1.{os.getpid()}"]
    pull(receiver, held((1, 2), 2.0), now=PULL_RETRY_S)
    assert receiver.newest == (1, 2)
    assert files_in(memory) == [f"1-2-{weights_digest(state(2.0))}"]


# -- what another worker has pulled -----------------------------------------------------------------------------------


def test_a_worker_finds_what_another_has_pulled_within_milliseconds(
    start_broker: StartBroker, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts how long a pump waits, while there is nothing to receive."""
    broker = start_broker()
    waiting, pulling = Feeder(broker.endpoints.worker), SharedWeights(FLEET)
    waiting.weights._shared = SharedWeights(FLEET)
    waiting.link.join(TIMEOUT_S)
    relay, waits = held((1, 1), 1.0), list[int]()
    assert pulling.claim()
    waiting.weights.receive(decode(relay.broadcast), 0.0)
    monkeypatch.setattr(waiting.link._poller, "poll", lambda wait_ms: waits.append(wait_ms) or [])
    waiting.link.pump(1.0)
    assert pulling.write(read(WeightsHeader, decode(relay.frames).header), relay.frames)
    waiting.link.pump(1.0)
    assert waiting.weights.newest == (1, 1)
    waiting.link.pump(1.0)
    assert waits == [int(SEEK_S * 1000), 0, 1000]
    waiting.link.close()
