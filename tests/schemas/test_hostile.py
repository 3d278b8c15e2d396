"""Whatever bytes arrive, a decoder answers with a valid object or `DecodeError`, within its caps of memory."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import golden_samples
import numpy as np
import orjson
import pytest
import xxhash

from headrace.learner_stub import ConnectorMerger
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.module_spaces import module_spaces_from_json
from headrace.schemas.chunks.spaces import spaces_from_json
from headrace.schemas.errors import ConnectorError, DecodeError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, MessageKind, WireLimits, decode
from headrace.schemas.messages import Message, read, read_hello
from support.decode_batch import decode_batch
from support.thorough import schedules

pytestmark = pytest.mark.long

MUTATIONS = 40_000
"""How many mutated messages are tried."""

Frames = list[bytes]
Receiver = Callable[[Frames], object]

ODD_VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        7,
        2**31,
        2**32,
        2**48,
        2**53,
        2**63 - 1,
        2**63,
        2**64 - 1,
        -(2**63),
        1.5,
        -0.0,
        1e308,
    ),
    *("", "O", "|O", "<U9", "<i8", "<f4", "|u1", "x" * 300, "\u0000", "3/1", "_table", "rewards", "obs", "payload"),
    *([], {}, [[]], [0], [2**40] * 8, [0, 2**47], ["x", "<i8", [1], 0, 0], {"kind": "dict", "spaces": {}}, [1, 2, 3]),
]
for _ in range(30):
    ODD_VALUES.append([ODD_VALUES[-1]])
ODD_JSON = [orjson.dumps(value) for value in ODD_VALUES]


def _reseal(frames: Frames, header: Any) -> Frames:
    """`frames` under another header, both checksums right again, so that what is wrong lies deeper."""
    payload = header.get("payload") if isinstance(header, dict) else None
    if isinstance(payload, dict):
        payload["checksum"] = xxhash.xxh3_64_intdigest(b"".join(frames[2:]))
        payload["sizes"] = [len(frame) for frame in frames[2:]]
    body = orjson.dumps(header)
    return [frames[0][:8] + xxhash.xxh3_64_intdigest(frames[0][:8] + body).to_bytes(8, "little"), body, *frames[2:]]


def _mutate_header(frames: Frames, rng: random.Random) -> Frames:
    header = orjson.loads(frames[1])
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        node: Any = header
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], dict | list) and rng.random() < 0.8:
                node = node[key]
                continue
            if rng.random() < 0.2:
                del node[key]
            elif isinstance(node, list) and rng.random() < 0.2:
                node.append(orjson.loads(orjson.dumps(node[key])))
            else:
                node[key] = orjson.loads(rng.choice(ODD_JSON))
            break
    return _reseal(frames, header)


def _mutate_payload(frames: Frames, rng: random.Random) -> Frames:
    changed = [bytearray(frame) for frame in frames]
    for frame in changed[2:]:
        for _ in range(rng.randrange(4)):
            if frame:
                frame[rng.randrange(len(frame))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        if rng.random() < 0.2:
            del frame[rng.randrange(len(frame) + 1) :]
    return _reseal([bytes(frame) for frame in changed], orjson.loads(frames[1]))


def _mutate_bytes(frames: Frames, rng: random.Random) -> Frames:
    i = rng.randrange(len(frames))
    frame = bytearray(frames[i])
    match rng.randrange(6):
        case 0:
            del frame[rng.randrange(len(frame) + 1) :]
        case 1:
            frame[rng.randrange(len(frame) + 1) : 0] = rng.randbytes(rng.randrange(1, 9))
        case 2:
            return frames[:i] + frames[i + 1 :]
        case 3:
            return frames[: i + 1] + frames[i:]
        case _:
            for _ in range(rng.choice((1, 1, 2, 8))):
                if frame:
                    frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return [*frames[:i], bytes(frame), *frames[i + 1 :]]


def _receivers() -> Iterator[tuple[Frames, Receiver]]:
    for cls in golden_samples.message_classes():
        yield [bytes(f) for f in golden_samples.sample_model(cls).frames()], _message_receiver(cls)
    for spaces in golden_samples.SPACES.values():
        for infos in ({}, {0: {1: {"score": [1, 2]}}}):
            batch = golden_samples.make_batch(spaces, infos=infos)
            yield [bytes(f) for f in golden_samples.encoded(batch)], _batch_receiver(spaces)
    more = (golden_samples.make_recurrent_batch(), golden_samples.make_lookback_batch(), _learnt_batch())
    for batch in more:
        yield [bytes(f) for f in golden_samples.encoded(batch)], _batch_receiver(golden_samples.SPACES["box"])


def _learnt_batch() -> ChunkBatch:
    """With what connectors have learnt."""
    batch = golden_samples.make_batch(golden_samples.SPACES["box"])
    parts = {"count": np.ones(1), "mean": np.zeros(4), "m2": np.zeros(4)}
    return replace(batch, connector_update={f"env_to_module/0.MeanStd/obs/{name}": a for name, a in parts.items()})


def _message_receiver(cls: type[Message]) -> Receiver:
    def receive(frames: Frames) -> object:
        message = decode(frames)
        understood = read_hello(message.header) if message.kind is MessageKind.HELLO else read(cls, message.header)
        understood.frames()  # what was understood can be passed on
        return understood

    return receive


def _batch_receiver(spaces: Any) -> Receiver:
    def receive(frames: Frames) -> object:
        _, batch = decode_batch(frames, *spaces)
        for chunk in batch:
            assert len(chunk.env_t) == len(chunk)
            assert chunk.lookback is None or len(chunk.lookback.columns["logp"]) == len(chunk.lookback)
        merger = ConnectorMerger(env_to_module=["headrace.workers.connectors:MeanStd"])
        for _ in range(2 if batch.connector_update else 0):
            with contextlib.suppress(ConnectorError):
                merger.take(batch)
        assert all(np.isfinite(array).all() for array in merger.get_state().values())
        return batch

    return receive


@pytest.mark.parametrize(("name", "numbers"), schedules({"mutations": MUTATIONS}))
def test_mutated_messages_give_a_valid_object_or_a_decode_error(name: str, numbers: range) -> None:
    """Each mutation replays from its number, which a failure prints."""
    receivers = list(_receivers())
    mutations = (_mutate_bytes, _mutate_header, _mutate_header, _mutate_payload)
    outcomes: Counter[str] = Counter()
    for number in numbers:
        rng = random.Random(f"{name}/{number}")
        frames, receive = receivers[number % len(receivers)]
        mutated = rng.choice(mutations)(frames, rng)
        try:
            receive(mutated)
            outcomes["valid"] += 1
        except DecodeError as error:
            outcomes[error.reason] += 1
        except BaseException as error:
            pytest.fail(f"number {number}: {error!r} for {mutated!r:.2000}")
    assert outcomes["valid"] > len(numbers) // 100, f"{len(numbers)} messages: {outcomes}"
    assert {"bad_message", "bad_batch_header", "bad_table", "bad_manifest", "bad_shape"} <= outcomes.keys()
    assert {"header_checksum", "payload_checksum", "bad_tag", "frame_count", "payload_sizes"} <= outcomes.keys()


def test_random_bytes_are_no_message() -> None:
    rng = random.Random(0)
    for _ in range(5000):
        with pytest.raises(DecodeError):
            decode([rng.randbytes(rng.choice((0, 16, 17, 99))) for _ in range(rng.randrange(5))])


SPACE = golden_samples.SPACES["nested"][0].model_dump(mode="json")


@pytest.mark.parametrize("read_space", [spaces_from_json, module_spaces_from_json])
def test_mutated_spaces_give_a_space_or_a_decode_error(read_space: Callable[[Any], object]) -> None:
    whole: Any = {"observation": SPACE, "action": SPACE}
    if read_space is module_spaces_from_json:
        whole = {"one": whole, "two": whole}
    frames = [b"HDRC" + bytes(12), orjson.dumps(whole)]
    valid = 0
    for number in range(5000):
        value = orjson.loads(_mutate_header(frames, random.Random(number))[1])
        try:
            read_space(value)
            valid += 1
        except DecodeError:
            continue
    assert valid
    for odd in [*ODD_VALUES, orjson.loads(b"[" * 1000 + b"]" * 1000)]:
        with pytest.raises(DecodeError):
            read_space([odd])


def _claims() -> dict[str, dict[str, Any]]:
    """Headers that claim much and bring nothing."""
    rows = {
        "huge": [["x", "<f8", [2**47], 0, 0]],
        "product": [["x", "<f8", [2**31, 2**31, 2**31], 0, 0]],
        "empty but huge": [["x", "<f8", [0, 2**40, 2**40], 0, 0]],
        "many": [[str(i), "<f8", [2**30], 0, 0] for i in range(DEFAULT_LIMITS.arrays)],
        "too many": [[str(i), "<f8", [0], 0, 0] for i in range(DEFAULT_LIMITS.arrays + 1)],
        "far": [["x", "<f8", [1], 0, 2**62]],
    }
    return {
        **{name: {"payload": {"arrays": manifest}} for name, manifest in rows.items()},
        "lists": {"x": [[]] * 300_000},
        "objects": {"x": [{"": 0}] * 140_000},
        "numbers": {"payload": {"arrays": [], "more": [0] * 400_000}},
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", list(_claims()))
def test_a_hostile_header_costs_no_more_memory_than_its_cap_times_forty(name: str) -> None:
    header = _claims()[name]
    frames = _reseal([b"HDRC\x01\x00\x05\x00", b"", b"12345678"], header)
    frames = frames if "payload" in header else frames[:2]
    tracemalloc.start()
    try:
        decode(frames)
        refused = False
    except DecodeError:
        refused = True
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert refused == ("payload" in header and name != "numbers")
    assert peak < 40 * DEFAULT_LIMITS.header_bytes


def test_infos_over_their_cap_are_refused_before_they_are_read() -> None:
    spaces = golden_samples.SPACES["box"]
    frames = [bytes(f) for f in golden_samples.encoded(golden_samples.make_batch(spaces, infos={0: {0: {"x": 1}}}))]
    with pytest.raises(DecodeError, match="bad_infos"):
        decode_batch(frames, *spaces, WireLimits(infos_bytes=8))
