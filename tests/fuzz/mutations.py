"""Seeded mutations of real messages, JSON values and bytes: numbers at bounds, other types, cut and flipped bytes.

A mutated message is sealed again, so that its checksums hold and the code behind the decoder has to judge it.
"""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import orjson

from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import Buffer, MessageKind, decode_header, encode_packed

NUMBERS = (0, 1, -1, 2, 65_535, 2**31 - 1, 2**32, 2**40 - 1, 2**48 - 1, 2**53 - 1, 2**53, 2**62, 2**63 - 1, 2**64 - 1)
FRACTIONS = (0.5, -0.0, 1e-300, 1e300, -1e308)
TEXTS = ("", "x", "NaN", "-1", "0/0", "1/99999999999", "\u0000\u202e\n", "é" * 300, "9" * 5000, "modules/" * 1200)
OTHERS = (None, True, False, [], {}, [1], {"a": 1}, [[[]]], [None] * 50, {"": [None, {}]})
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


_own = threading.local()


class Refusals:
    """Counts what the product's decoders refuse while it is entered; not what `peek` finds out."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = before = DecodeError.__init__

        def counted(error: DecodeError, reason: str, detail: str) -> None:
            self.count += not getattr(_own, "peeks", False)
            before(error, reason, detail)

        DecodeError.__init__ = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        DecodeError.__init__ = self._before  # type: ignore[method-assign]


@contextmanager
def uncounted() -> Iterator[None]:
    """While it is entered, what this thread refuses does not count."""
    _own.peeks = True
    try:
        yield
    finally:
        _own.peeks = False


def peek(frames: Sequence[Buffer]) -> tuple[MessageKind | None, dict[str, Any], str]:
    """Return (kind, header, "") of a message, or (None, {}, why it cannot be read)."""
    with uncounted():
        try:
            return *decode_header(frames), ""
        except DecodeError as error:
            return None, {}, error.reason


class Mutator:
    """All mutations of one schedule; the same seed gives the same ones."""

    def __init__(self, seed: int, name: str) -> None:
        self.random = random.Random(f"{name} {seed}")

    def strange(self, *, finite: bool = True) -> Any:
        """Any value that has no place in a message of an honest peer."""
        rng = self.random
        if rng.random() < 0.03:
            return deep(rng.choice((50, 200, 900)))
        kinds = (NUMBERS, NUMBERS, FRACTIONS, TEXTS, OTHERS, NOT_FINITE)
        return copy.deepcopy(rng.choice(rng.choice(kinds[:-1] if finite else kinds)))  # type: ignore[arg-type]

    def value(self, value: Any, *, finite: bool = True) -> Any:
        """Return a copy of a JSON value with one to three of its places changed."""
        changed = json.loads(json.dumps(value))
        for _ in range(self.random.choice((1, 1, 2, 3))):
            changed = self._changed(changed, finite)
        return changed

    def _changed(self, root: Any, finite: bool) -> Any:
        places = _places(root)
        if not places or self.random.random() < 0.02:
            return self.strange(finite=finite)
        node, key = self.random.choice(places)
        match self.random.randrange(8):
            case 0:
                del node[key]
            case 1 if isinstance(node, list):
                node += node[key : key + 1] * self.random.choice((1, 5, 300))
            case 1:
                node[self.random.choice(TEXTS)] = node.pop(key)
            case _:
                is_number = type(node[key]) is int and self.random.random() < 0.7
                node[key] = self.random.choice(NUMBERS) if is_number else self.strange(finite=finite)
        return root

    def text(self, value: Any) -> bytes:
        """Return JSON text of the value, changed: its values, which may be NaN then, its bytes, or both."""
        if self.random.random() < 0.75:
            changed, is_ascii = self.value(value, finite=False), self.random.random() < 0.5
            with suppress(RecursionError):  # two deep values, one in the other, are too deep to write
                return json.dumps(changed, ensure_ascii=is_ascii).encode(errors="surrogatepass")
        return self.data(json.dumps(value).encode())

    def data(self, data: bytes) -> bytes:
        """Return the bytes with some of them flipped, cut off, doubled or replaced."""
        rng, changed = self.random, bytearray(data)
        match rng.randrange(5):
            case 0:
                return bytes(changed[: rng.randrange(len(changed) + 1)])
            case 1:
                at = rng.randrange(len(changed) + 1)
                return bytes(changed[:at] + rng.randbytes(rng.choice((1, 8, 200))) + changed[at:])
            case 2:
                at = rng.randrange(len(changed) + 1)
                return bytes(changed + changed[at:])
            case 3 if len(changed) >= 8:
                at = 8 * rng.randrange(len(changed) // 8)
                number = rng.choice(NUMBERS) & (2**64 - 1)
                changed[at : at + 8] = number.to_bytes(8, "little")
            case _:
                for _ in range(rng.choice((1, 1, 8)) if changed else 0):
                    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    def message(self, frames: Sequence[Buffer]) -> list[Buffer]:
        """Return the frames of a message with another header, other arrays, or damage."""
        parts = [bytes(frame) for frame in frames]
        if self.random.random() < 0.1:
            at = self.random.randrange(len(parts))
            match self.random.randrange(3):
                case 0:
                    del parts[at]
                case 1:
                    parts.insert(at, parts[at])
                case _:
                    parts[at] = self.data(parts[at])
            return list(parts)
        kind, header, _ = peek(parts)
        if kind is None:  # it was a lie already
            return list(parts)
        payload, arrays = header.pop("payload", None), list[Buffer](parts[2:])
        if self.random.random() < 0.02:
            kind = self.random.choice(list(MessageKind))
        if not arrays or self.random.random() < 0.6:
            header = self.value(header)
        if arrays and self.random.random() < 0.5:
            at = self.random.randrange(len(arrays))
            arrays[at] = self.data(bytes(arrays[at]))
        manifest = payload["arrays"] if payload else []
        if payload and self.random.random() < 0.2:
            manifest = self.value(manifest)
        encoding = {name: payload[name] for name in ("encoding", "raw_sizes") if payload and name in payload}
        if encoding and self.random.random() < 0.5:
            encoding = self.value(encoding)
        return sealed(kind, header if isinstance(header, dict) else {}, arrays, manifest, encoding)


def sealed(
    kind: MessageKind, header: dict[str, Any], arrays: list[Buffer], manifest: Any, encoding: Any = None
) -> list[Buffer]:
    """Return the frames of a message as a sender would seal it; without payload where there are no arrays."""
    try:
        if arrays or manifest:
            return encode_packed(kind, header, arrays, manifest, encoding)
        return encode_packed(kind, header, [], [])
    except Exception:  # a sender cannot write it, so it never goes out
        return encode_packed(kind, {}, [], [])


def deep(levels: int) -> Any:
    """Return lists and objects within one another, so deep."""
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def _places(root: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every place in a JSON value."""
    found: list[tuple[Any, Any]] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        keys: Any = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        found += [(node, key) for key in keys]
        waiting += [node[key] for key in keys]
        if len(found) > 5000:
            break
    return found


def as_json(value: Any) -> Any:
    """Return what JSON makes of a value."""
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY))
