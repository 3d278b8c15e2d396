"""The codec: it writes one message as ZeroMQ frames and reads it back, without running any of its bytes.

    frame 0   16 bytes   "HDRC" | major u8 | minor u8 | kind u8 | 0 | checksum u64le
                         checksum = xxh3_64 over the first 8 bytes of this frame and all of frame 1
    frame 1   orjson     the header; with arrays it also has
                         "payload": {"checksum": xxh3_64 over frames 2.. in order,
                                     "sizes": [bytes of frame 2, ...],
                                     "arrays": [[name, dtype, shape, frame, byte offset], ...]}
                    and "encoding" with "raw_sizes" if they are compressed (`compression.py`)
    frame 2…  raw        C-contiguous little-endian buffers. Weights that numpy has no dtype for are bits under the name
                         of their dtype ("bfloat16"). Arrays of 64 KiB and more have a frame of their own and are
                         sent without a copy; smaller ones are joined in one frame, each at a multiple of 64 bytes.

The two checksums chain: frame 0 covers the header, and the header names the checksum of the payload. So a broker checks
all it reads (frames 0 and 1) without touching array bytes, and the receiver of the arrays checks the rest. xxh3
protects against faults; CURVE protects against forgery.

`decode` allocates nothing in proportion to what a header claims. It first compares sizes, counts and dtypes with the
bytes at hand, and arrays are read-only views of the received frames. It does allocate the parsed header, about thirty
times its bytes at worst. Anything wrong is one `DecodeError`.

A view may lie at an address that is no multiple of its item size, since libzmq hands small frames out of its receive
buffer. numpy and torch read such views correctly; other consumers should copy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, unique
from typing import Any

import orjson
import xxhash
from numpy.typing import NDArray

from headrace.schemas.errors import DecodeError, EncodeError, InfosTooLargeError
from headrace.schemas.frames.compression import LZ4, compress, decompress
from headrace.schemas.frames.manifest import ALLOWED_DTYPES as ALLOWED_DTYPES
from headrace.schemas.frames.manifest import DEFAULT_LIMITS as DEFAULT_LIMITS
from headrace.schemas.frames.manifest import OWN_FRAME_BYTES as OWN_FRAME_BYTES
from headrace.schemas.frames.manifest import WEIGHTS_LIMITS as WEIGHTS_LIMITS
from headrace.schemas.frames.manifest import Buffer as Buffer
from headrace.schemas.frames.manifest import WireLimits as WireLimits
from headrace.schemas.frames.manifest import pack, view

MAGIC = b"HDRC"
PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1

_TAG = struct.Struct("<4sBBBBQ")
_TAG_BYTES = _TAG.size
_TAG_HEAD = struct.Struct("<4sBBBB")


@unique
class MessageKind(IntEnum):
    """The kinds of messages. Each but BATCH and WEIGHTS has its fields in a file of messages."""

    HELLO = 1
    WELCOME = 2
    REJECT = 3
    FENCED = 4
    BATCH = 5
    ACK = 6
    HEARTBEAT = 7
    BYE = 8
    COMMIT = 9
    STATUS = 10
    SOURCE_END = 11
    WEIGHTS = 12
    WEIGHTS_PULL = 13
    WEIGHTS_PART = 14
    OBITUARY = 15
    WEIGHTS_ACK = 16
    SKIP = 17
    SOURCE_START = 18
    SOURCE_GAP = 19
    ENV_ORDERS = 21
    ENV_ANSWERS = 22
    LEARNER_ROWS = 23
    TASKS = 24
    TASKS_ACK = 25
    EPISODE_START = 40  # from here on: between a policy server and its clients
    EPISODE_STEP = 41
    EPISODE_ABORT = 42
    EPISODE_ANSWER = 43
    EPISODE_CHUNKS = 44


_ENCODING = b'"encoding"'
"""Stands in the header of each message with compressed arrays."""

_KINDS = {kind.value: kind for kind in MessageKind}


@dataclass(frozen=True, slots=True)
class WireMessage:
    """One decoded message. `arrays` are read-only views of the frames it came in."""

    kind: MessageKind
    header: dict[str, Any]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


def encode(
    kind: MessageKind,
    header: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]] | None = None,
    *,
    compressed: bool = False,
) -> list[Buffer]:
    """Return the frames of one message. Large arrays are not copied: do not write to them until the message is settled.

    `compressed`: compress its arrays by lz4, which must be installed, and which the receiver must read.

    Raises `EncodeError` for a dtype outside the allow-list (object arrays above all), a header that JSON cannot carry,
    and a message that no receiver takes (`limits_of`). The sender must compare the payload's size with what the
    receiver advertised.
    """
    if not arrays:
        return _seal(kind, header, [])
    frames, manifest = pack(arrays)
    if compressed:
        smaller, raw_sizes = compress(frames)
        if any(raw_sizes):
            return encode_packed(kind, header, smaller, manifest, {"encoding": LZ4, "raw_sizes": raw_sizes})
    return encode_packed(kind, header, frames, manifest)


def encode_packed(
    kind: MessageKind,
    header: Mapping[str, Any],
    frames: list[Buffer],
    manifest: list[list[Any]],
    encoding: Mapping[str, Any] | None = None,
    *,
    header_bytes: int = 0,
) -> list[Buffer]:
    """Return the frames of a message whose arrays already lie in `frames`, as the manifest says.

    `encoding`: fields that say how the frames are compressed. Frame 1 is filled with spaces to `header_bytes` where it
    is shorter. Raises as `encode` does.
    """
    sizes, limits = list(map(len, frames)), limits_of(kind)
    nbytes = sum(sizes)
    if len(manifest) > limits.arrays:
        raise EncodeError(f"{kind.name} has {len(manifest)} arrays; {limits.arrays} are allowed")
    if nbytes > limits.payload_bytes:
        raise EncodeError(f"{kind.name} has {nbytes} bytes; {limits.payload_bytes} are allowed")
    payload = {"checksum": _checksum(frames), "sizes": sizes, "arrays": manifest, **(encoding or {})}
    return _seal(kind, {**header, "payload": payload}, frames, header_bytes)


def limits_of(kind: MessageKind) -> WireLimits:
    """Return what a receiver of this kind of message accepts, where it does not say otherwise."""
    return WEIGHTS_LIMITS if kind is MessageKind.WEIGHTS else DEFAULT_LIMITS


def is_compressed(header: Mapping[str, Any]) -> bool:
    """Return whether a message whose header `decode_header` gave has compressed arrays."""
    payload = header.get("payload")
    return payload is not None and payload.get("encoding") is not None


def decompressed(frames: Sequence[Buffer], limits: WireLimits = DEFAULT_LIMITS) -> list[Buffer]:
    """Return a message without compression, for a receiver that does not read it. Raises `DecodeError`."""
    if len(frames) > 1 and _ENCODING not in bytes(frames[1]):
        return list(frames)  # to read the header of each batch would take the broker twice as long
    kind, header = decode_header(frames, limits)
    if not is_compressed(header):
        return list(frames)
    payload = header.pop("payload")
    check_payload(payload, frames)
    manifest = payload.get("arrays")
    if not isinstance(manifest, list):
        raise DecodeError("bad_manifest", "manifest is not a list")
    return encode_packed(kind, header, decompress(payload, frames[2:], limits), manifest)


def _checksum(payload: Sequence[Buffer]) -> int:
    if len(payload) == 1:
        return xxhash.xxh3_64_intdigest(payload[0])
    checksum = xxhash.xxh3_64()
    for frame in payload:
        checksum.update(frame)
    return checksum.intdigest()


def _seal(kind: MessageKind, header: Mapping[str, Any], payload: list[Buffer], header_bytes: int = 0) -> list[Buffer]:
    try:
        body = orjson.dumps(header).ljust(header_bytes)
    except TypeError as error:
        raise EncodeError(f"header of {kind.name} cannot be written as JSON: {error}") from error
    if len(body) > (most := limits_of(kind).header_bytes):
        if kind is MessageKind.BATCH:  # parts of it have fewer agents and tasks
            raise InfosTooLargeError(len(body), most, "names of agents, tasks and counts")
        raise EncodeError(f"header of {kind.name} has {len(body)} bytes; {most} are allowed")
    head = _TAG_HEAD.pack(MAGIC, PROTOCOL_MAJOR, PROTOCOL_MINOR, kind, 0)
    return [head + xxhash.xxh3_64_intdigest(head + body).to_bytes(8, "little"), body, *payload]


def read_tag(frame: Buffer) -> tuple[MessageKind, int, int, int]:
    """Read (kind, major, minor, checksum) of frame 0 without judging the version of a known kind."""
    if len(frame) != _TAG_BYTES:
        raise DecodeError("bad_tag", f"frame 0 has {len(frame)} bytes, not {_TAG_BYTES}")
    magic, major, minor, kind, zero, checksum = _TAG.unpack(frame)
    if magic != MAGIC or zero != 0:
        raise DecodeError("bad_tag", f"frame 0 starts with {bytes(frame)[:8]!r}, which is not Headrace")
    known = _KINDS.get(kind)
    if known is None:
        _check_version(major, minor)
        raise DecodeError("unknown_kind", f"message kind {kind} is unknown to protocol {PROTOCOL_MAJOR}")
    return known, major, minor, checksum


def _check_version(major: int, minor: int) -> None:
    if major != PROTOCOL_MAJOR:
        raise DecodeError("version_mismatch", f"peer speaks protocol {major}.{minor}, this side {PROTOCOL_MAJOR}.x")


def decode_header(frames: Sequence[Buffer], limits: WireLimits | None = None) -> tuple[MessageKind, dict[str, Any]]:
    """Return (kind, header) after every check that needs no array byte, as a broker does before it forwards it.

    Without `limits`, those of the message's kind hold.
    """
    most = (limits or DEFAULT_LIMITS).frames
    if not 2 <= len(frames) <= most:
        raise DecodeError("frame_count", f"{len(frames)} frames; 2 to {most} are allowed")
    kind, major, minor, checksum = read_tag(frames[0])
    _check_version(major, minor)
    limits = limits or limits_of(kind)
    if len(frames[1]) > limits.header_bytes:
        raise DecodeError("header_too_large", f"header of {len(frames[1])} bytes; {limits.header_bytes} are allowed")
    tag, body = bytes(frames[0]), bytes(frames[1])
    if xxhash.xxh3_64_intdigest(tag[:8] + body) != checksum:
        raise DecodeError("header_checksum", "tag and header do not match their checksum")
    header = _load_header(body, limits)
    _check_sizes(header.get("payload"), frames, limits)
    return kind, header


def _load_header(body: bytes, limits: WireLimits) -> dict[str, Any]:
    try:
        header = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise DecodeError("bad_header", f"header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise DecodeError("bad_header", f"header is a JSON {type(header).__name__}, not an object")
    if body.count(b"[") + body.count(b"{") > limits.header_depth or body.count(b":") > limits.names:
        _check_shape(header, limits)
    return header


def _check_shape(header: dict[str, Any], limits: WireLimits) -> None:
    """Raise `DecodeError` for a header that is nested too deep, or has an object of too many names.

    Pydantic makes an error for each wrong value of an object.
    """
    level: list[Any] = [header]
    for _ in range(limits.header_depth):
        most = max((len(value) for value in level if value.__class__ is dict), default=0)
        if most > limits.names:
            raise DecodeError("bad_header", f"an object of {most} names; {limits.names} are allowed")
        level = _containers_in(level)
        if not level:
            return
    raise DecodeError("bad_header", f"header is nested deeper than {limits.header_depth} levels")


def most_names(value: Any) -> int:
    """Return how many names the largest object in a JSON value has. The value has an end: see `is_deeper`."""
    most, level = 0, _containers_in([[value]])
    while level:
        most = max(most, *(len(each) if each.__class__ is dict else 0 for each in level), 0)
        level = _containers_in(level)
    return most


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether a JSON value is nested deeper than `depth`.

    orjson reads a thousand levels, but writes a quarter of them; `repr` and pydantic fail in ways of their own.
    """
    level = _containers_in([[value]])
    for _ in range(depth):
        if not level:
            return False
        level = _containers_in(level)
    return bool(level)


def _containers_in(level: Sequence[Any]) -> list[Any]:
    """Return the objects and arrays that stand directly in those of `level`."""
    return [
        part
        for value in level
        for part in (value.values() if isinstance(value, dict) else value)
        if isinstance(part, dict | list)
    ]


def _check_sizes(payload: Any, frames: Sequence[Buffer], limits: WireLimits) -> None:
    sizes = list(map(len, frames[2:]))
    if sum(sizes) > limits.payload_bytes:
        raise DecodeError("payload_too_large", f"payload of {sum(sizes)} bytes; {limits.payload_bytes} are allowed")
    if payload is None:
        if sizes:
            raise DecodeError("payload_sizes", f"{len(sizes)} payload frames, but the header announces none")
        return
    if not isinstance(payload, dict) or payload.get("sizes") != sizes:
        raise DecodeError("payload_sizes", f"payload frames of {sizes[:8]} bytes are not what the header announces")


def decode(frames: Sequence[Buffer], limits: WireLimits | None = None, *, checks_payload: bool = True) -> WireMessage:
    """Return the message in `frames`, its arrays as read-only views. Raises `DecodeError` and nothing else."""
    kind, header = decode_header(frames, limits)
    of_weights, limits = kind is MessageKind.WEIGHTS, limits or limits_of(kind)
    if not checks_payload and (payload := header.get("payload")) is not None:
        return WireMessage(kind, header, views_of(payload, frames, limits, of_weights=of_weights))
    return WireMessage(kind, header, decode_arrays(header, frames, limits, of_weights=of_weights))


def decode_arrays(
    header: dict[str, Any], frames: Sequence[Buffer], limits: WireLimits = DEFAULT_LIMITS, *, of_weights: bool = False
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a message whose `header` came from `decode_header`. Raises `DecodeError`."""
    payload = header.get("payload")
    if payload is None:
        return {}
    check_payload(payload, frames)
    if is_compressed(header):
        frames = [*frames[:2], *decompress(payload, frames[2:], limits)]
    return views_of(payload, frames, limits, of_weights=of_weights)


def views_of(
    payload: dict[str, Any], frames: Sequence[Buffer], limits: WireLimits = DEFAULT_LIMITS, *, of_weights: bool = False
) -> dict[str, NDArray[Any]]:
    """Return read-only views of frames that are not compressed, without a look at their bytes. Raises `DecodeError`."""
    manifest = payload.get("arrays")
    if not isinstance(manifest, list) or len(manifest) > limits.arrays:
        raise DecodeError("bad_manifest", f"manifest is not a list of at most {limits.arrays} arrays")
    arrays: dict[str, NDArray[Any]] = {}
    for row in manifest:
        name, array = view(row, frames, limits, of_weights=of_weights)
        if name in arrays:
            raise DecodeError("bad_manifest", f"array {name!r} is listed twice")
        arrays[name] = array
    return arrays


def check_payload(payload: dict[str, Any], frames: Sequence[Buffer]) -> None:
    """Raise `DecodeError` unless the frames hold the payload that was sent, which the header describes as `payload`."""
    if payload.get("checksum") != _checksum(frames[2:]):
        raise DecodeError("payload_checksum", "payload does not match its checksum")


def frames_of(blob: Buffer, sizes: Iterable[int]) -> list[Buffer]:
    """Return the frames of these `sizes` that make up `blob`, as views of it."""
    whole, start, frames = memoryview(blob), 0, list[Buffer]()
    for size in sizes:
        frames.append(whole[start : start + size])
        start += size
    return frames
