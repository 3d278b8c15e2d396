"""Samples of everything that goes on the wire, and the golden files made from them.

    python tests/golden/golden_samples.py

writes the golden files that are not there yet: those of a new kind of message or space. One that is there was sent by a
peer of this protocol version, and must be understood for as long as that is; nothing here writes it anew.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import orjson
from pydantic import BaseModel

import headrace.workers.envs.remote.env_messages
import headrace.workers.serving.serving_messages  # noqa: F401 - messages of both, and of serving_messages.py, have samples too
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.basics.bounds import ChosenName, Reason, Token
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.chunks.chunk import CHUNK_TABLE, EXPLORE, ChunkEnd
from headrace.schemas.chunks.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Tuple,
    leaf_shape,
    leaves,
)
from headrace.schemas.chunks.task import spread
from headrace.schemas.frames.wire import Buffer, decode
from headrace.schemas.messages import Message, WeightedTask

M = TypeVar("M", bound=BaseModel)

SPACES: dict[str, tuple[Space, Space]] = {
    "box": (Box(shape=(4,), dtype="<f4"), Discrete(n=2)),
    "image": (Box(shape=(2, 3, 1), dtype="|u1", low=0, high=255), Discrete(n=3, start=-1, dtype="<i4")),
    "discrete": (Discrete(n=5, start=7), Box(shape=(2,), dtype="<f8", low=(-1.0, None), high=(1.0, 2.0))),
    "multi": (MultiBinary(shape=(3,)), MultiDiscrete(nvec=(2, 3), start=(0, 1), shape=(2,))),
    "nested": (
        Dict(
            spaces={"arm": Tuple(spaces=(Box(shape=(), dtype="<f2"), Discrete(n=3))), "a/b": MultiBinary(shape=(2, 2))}
        ),
        Tuple(spaces=(Discrete(n=2), Dict(spaces={"grip": Box(shape=(1,), dtype="<f4")}))),
    ),
}

TOTALS = WorkerTotals(
    seq=3,
    stepped=100,
    open=10,
    shipped=80,
    shipped_chunks=9,
    discarded={"env_exception": 7},
    dropped={"oversize": (3, 1)},
)


def make_batch(
    spaces: tuple[Space, Space],
    lengths: Sequence[int] = (3, 0, 2, 1),
    ends: Sequence[ChunkEnd] = (ChunkEnd.TERMINATED, ChunkEnd.ABORTED, ChunkEnd.ONGOING, ChunkEnd.TRUNCATED),
    infos: dict[int, dict[int, dict[str, Any]]] | None = None,
    seed: int = 0,
) -> ChunkBatch:
    """A batch of chunks of these lengths with numbers that are all different; a length of 0 must be an ABORTED one."""
    table = np.zeros(len(lengths), CHUNK_TABLE)
    table["length"], table["end"] = lengths, ends
    table["id_high"], table["id_low"] = 2**63 + seed, np.arange(len(lengths))
    table["seed"], table["t_start"] = np.arange(len(lengths)) + 11, np.arange(len(lengths)) * 100
    table["chunk_index"], table["env_index"] = np.arange(len(lengths)) + 1, np.arange(len(lengths))[::-1]
    table["episode_return"], table["episode_length"] = np.arange(len(lengths)) + 0.5, table["t_start"] + lengths
    table["agent"], table["flags"] = np.arange(len(lengths)) % 2, EXPLORE * (np.arange(len(lengths)) % 2)
    table["reason"] = np.asarray(ends) == ChunkEnd.ABORTED
    steps, rows = sum(lengths), sum(n + 1 for n in lengths if n)
    columns = {name: fill(leaf, rows) for name, leaf in leaves(spaces[0], "obs")}
    columns |= {name: fill(leaf, steps) for name, leaf in leaves(spaces[1], "actions")}
    columns |= {"rewards": np.arange(steps) / 4, "weights_seq": np.arange(steps) + 5, "env_t": np.arange(steps) + 9}
    columns |= {"logp": -np.arange(steps, dtype=np.float32), "logits": np.ones((steps, 2), np.float32)}
    return ChunkBatch(
        table=table,
        arrays=columns,
        observation_space=spaces[0],
        action_space=spaces[1],
        agents=("red", "blue"),
        modules=("shared",),
        reasons=("", "env_exception"),
        infos=infos or {},
        slot=3,
        incarnation=2,
        seq=17,
        learner_epoch=4,
        weights_digest="d1",
    )


def make_recurrent_batch() -> ChunkBatch:
    """The same with two state columns: a row for each of its three chunks with steps, none for the end marker."""
    batch = make_batch(SPACES["box"])
    batch.arrays["state_in/h"] = np.arange(6, dtype=np.float32).reshape(3, 2)
    batch.arrays["state_in/age"] = np.array([7, 8, 9], np.int64)
    return batch


def make_lookback_batch() -> ChunkBatch:
    """The same with two chunks that look back, on three steps together."""
    batch = make_batch(SPACES["box"])
    batch.table["lookback"] = (0, 0, 2, 1)
    steps = {name: column[:3] for name, column in batch.arrays.items()}
    batch.arrays.update({f"lookback/{name}": column for name, column in steps.items()})
    return batch


def fill(leaf: Any, rows: int) -> np.ndarray[Any, Any]:
    """An array of `rows` rows for `leaf`, counting up."""
    shape = (rows, *leaf_shape(leaf))
    return (np.arange(int(np.prod(shape))) % 200).reshape(shape).astype(leaf.dtype)


def header_of(batch: ChunkBatch) -> BatchHeader:
    """The header a worker would send with `batch`."""
    return BatchHeader(
        fleet_id="f",
        slot=batch.slot,
        incarnation=batch.incarnation,
        seq=batch.seq,
        steps=batch.steps,
        chunks=len(batch),
        learner_epoch=batch.learner_epoch,
        weights_seq=5,
        weights_digest=batch.weights_digest,
        agents=list(batch.agents),
        modules=list(batch.modules),
        reasons=list(batch.reasons),
        episodes=[(1.5, 3), (-2.0, 1)],
        totals=TOTALS,
    )


def encoded(batch: ChunkBatch) -> list[Buffer]:
    """The frames of `batch` under its own header."""
    return encode_batch(batch, header_of(batch))


def assert_same_arrays(a: Any, b: Any) -> None:
    """The same nesting, dtypes, shapes and values."""
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same_arrays(a[key], b[key])
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_arrays(x, y)
    else:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


ONCE_UNBOUNDED = [
    part for name in (Reason, Token, ChosenName) for field in get_args(name)[1:] for part in field.metadata
]
"""Bounds of names that had none when their samples were recorded."""


def message_classes(base: type[Message] = Message) -> Iterator[type[Message]]:
    """Every kind of control message that has a place on the wire."""
    for cls in base.__subclasses__():
        if hasattr(cls, "KIND"):
            yield cls
        yield from message_classes(cls)


def sample_model(model: type[M], seed: str = "") -> M:
    """A `model` with a value in each field, down its tree. A field's value depends on its name and the seed alone."""
    values = {}
    for name, field in model.model_fields.items():
        values[name] = _value(field.annotation, field.metadata, random.Random(f"{seed}{model.__name__}.{name}"))
    if model is WeightedTask:
        values["values"] = {"level": 3, "gravity": spread(0.5, 2.0)}
    return model.model_validate(values)


def _value(annotation: Any, metadata: Sequence[Any], rng: random.Random) -> Any:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(args[0], args[1:], rng)
    if origin is Literal:
        return rng.choice(args)
    if origin in (Union, UnionType):
        return _value(args[0], metadata, rng)
    if origin is tuple:
        return tuple(_value(arg, (), rng) for arg in args)
    if origin is list:
        return [_value(args[0], (), rng) for _ in range(2)]
    if origin is dict:
        return {_value(args[0], (), rng): _value(args[1], (), rng) for _ in range(2)}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return sample_model(annotation, str(rng.random()))
    parts = [inner for part in metadata for inner in getattr(part, "metadata", [part])]
    patterns = [pattern for part in parts if (pattern := getattr(part, "pattern", None))]
    if scheme := re.match(r"\^\((tcp|http):", "".join(patterns)):
        return f"{scheme[1]}://w{rng.randrange(100)}:{rng.randrange(1, 1000)}"
    if annotation is str and metadata and not any(part in ONCE_UNBOUNDED for part in parts):
        text = f"{rng.randrange(100)}/{rng.randrange(100)}"
        texts = [text, text.replace("/", "."), text.replace("/", "-")]
        return next(text for text in texts if all(re.search(pattern, text) for pattern in patterns))
    scalars = {
        int: rng.randrange(1, 1000),
        float: rng.randrange(1, 99) / 8,
        bool: rng.random() < 0.5,
        Any: {"kind": "x"},
    }
    return scalars[annotation] if annotation in scalars else f"w{rng.randrange(1000)}"


def golden() -> Iterator[tuple[str, list[Buffer]]]:
    """(name, frames) of each golden sample as today's code encodes it."""
    for cls in message_classes():
        yield cls.__name__, sample_model(cls).frames()
    for family, spaces in SPACES.items():
        batch = make_batch(spaces, infos={0: {3: {"success": True}}} if family == "box" else None)
        yield f"batch_{family}", encoded(batch)
    yield "batch_recurrent", encoded(make_recurrent_batch())
    yield "batch_lookback", encoded(make_lookback_batch())


def describe(frames: Sequence[Buffer]) -> dict[str, Any]:
    """All that a message says, as JSON: kind, header without the codec's own part, and each array in full."""
    message = decode(frames)
    header = {key: value for key, value in message.header.items() if key != "payload"}
    arrays = {name: [a.dtype.str, list(a.shape), a.ravel().tolist()] for name, a in message.arrays.items()}
    return {"kind": message.kind.name, "header": header, "arrays": arrays}


def add_new(folder: Path) -> None:
    """Write each sample that `folder` lacks, as NAME.bin (per frame its length as u32le, then its bytes) and NAME.json
    (what it says)."""
    for name, frames in golden():
        if (folder / f"{name}.bin").exists():
            continue
        write(folder / f"{name}.bin", frames)
        (folder / f"{name}.json").write_bytes(orjson.dumps(describe(frames), option=orjson.OPT_APPEND_NEWLINE))


def write(path: Path, frames: Sequence[Buffer]) -> None:
    """Write a NAME.bin."""
    path.write_bytes(b"".join(len(frame).to_bytes(4, "little") + bytes(frame) for frame in frames))


def read(path: Path) -> list[Buffer]:
    """The frames in a NAME.bin."""
    blob, frames = memoryview(path.read_bytes()), []
    while blob:
        size = int.from_bytes(blob[:4], "little")
        frames.append(bytes(blob[4 : 4 + size]))
        blob = blob[4 + size :]
    return frames


def contains(new: Any, old: Any) -> bool:
    """Return whether `new` has all that `old` has, with the same values; keys may have been added."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and contains(new[key], old[key]) for key in old)
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(contains, new, old))
    return bool(new == old)


if __name__ == "__main__":
    add_new(Path(__file__).parent)
