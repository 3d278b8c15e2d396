"""One version of the weights as arrays by name: its digest, and the WEIGHTS message that carries it."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.tensor_array import dtype_name
from headrace.schemas.errors import WRAPPERS, DecodeError, EncodeError, WeightsMismatchError, which_module_error
from headrace.schemas.frames.manifest import lay_out
from headrace.schemas.frames.wire import WEIGHTS_LIMITS, Buffer, MessageKind, WireMessage, encode_packed
from headrace.schemas.messages import ModuleKinds, WeightsHeader, kind_of, read

Arrays = Mapping[str, NDArray[Any]]

MOST_WEIGHTS_BYTES = WEIGHTS_LIMITS.payload_bytes + 2 * WEIGHTS_LIMITS.header_bytes
"""Bytes of one version's message at most."""

INLINE_BYTES = 1 << 18
"""Larger versions are announced to workers of all machines, which map them from memory or fetch them."""

MAPPED_BYTES = 1 << 16
"""Larger versions lie in the memory of the broker's machine, where each process maps them and checks their checksums.
Receiving such a version and taking its digest again takes each process longer.
"""

_STEP_BYTES = 1 << 20

MODULES = "modules/"
"""Prefix of "module id/name", for arrays of one of several modules."""

CONNECTORS = "connectors/"
"""Prefix of connector state that goes with weights: "connectors/env_to_module/0.MeanStd/obs/count"."""

Digest = xxhash.xxh3_128 | hashlib.blake2b
T = TypeVar("T")

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A whole, checked version."""

    version: Version
    digest: str
    arrays: Arrays


def join_modules(by_module: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Join {module id: {name: array}} in one mapping, which `split_modules` takes apart. An id has no slash."""
    return {f"{MODULES}{module_id}/{name}": a for module_id, own in by_module.items() for name, a in own.items()}


def split_modules(arrays: Mapping[str, T]) -> dict[str, dict[str, T]] | None:
    """Split joined names into {module id: {name: array}}.

    None for the weights of one module without a name, as most fleets have.
    """
    by_module: dict[str, dict[str, T]] = {}
    for name, array in arrays.items():
        if not name.startswith(MODULES):
            return None
        module_id, _, own = name.removeprefix(MODULES).partition("/")
        by_module.setdefault(module_id, {})[own] = array
    return by_module


def check_shapes(given: Shapes, own: Shapes, module_id: str = "") -> None:
    """Raise `WeightsMismatchError` unless `given` has the names and shapes of a module's `own` tensors."""
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    differ = {
        name: (tuple(given[name]), tuple(own[name]))
        for name in own
        if name in given and tuple(given[name]) != tuple(own[name])
    }
    if missing or unknown or differ:
        raise WeightsMismatchError(missing, unknown, differ, module_id)


def fit_names(given: Mapping[str, T], own: Iterable[str]) -> Mapping[str, T]:
    """Return `given` under a module's `own` names, if they differ only in what wrappers put into them.

    `torch.compile` adds the part `_orig_mod.` and DDP the part `module.`, at any depth and on either side.
    """
    names = set(own)
    if given.keys() == names:
        return given
    bare = {_without_wrappers(name): name for name in names}
    if len(bare) < len(names) or bare.keys() != {_without_wrappers(name) for name in given} or len(bare) < len(given):
        return given
    return {bare[_without_wrappers(name)]: value for name, value in given.items()}


def unwrapped(arrays: Mapping[str, T]) -> Mapping[str, T]:
    """Return weights without `_orig_mod.` in names, and without a `module.` in front of all names of a module.

    Raises `EncodeError` where two names become one.
    """
    if not any("_orig_mod" in name or "module." in name for name in arrays):
        return arrays
    if (by_module := split_modules(arrays)) is not None:
        return join_modules({module_id: unwrapped(own) for module_id, own in by_module.items()})
    bare = {name: name for name in arrays if name.startswith(CONNECTORS)}
    own = {name: ".".join(p for p in name.split(".") if p != "_orig_mod") for name in arrays if name not in bare}
    if all(name.startswith("module.") for name in own.values()):
        own = {name: plain.removeprefix("module.") for name, plain in own.items()}
    bare |= own
    first: dict[str, str] = {}
    for name, plain in bare.items():
        if (other := first.setdefault(plain, name)) != name:
            raise EncodeError(f"{other!r} and {name!r} are both {plain!r} without wrappers' names; publish one of them")
    return {bare[name]: value for name, value in arrays.items()}


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _check_kinds(given: Arrays, own: Iterable[str], kinds: str, module_id: str) -> None:
    """Raise `WeightsMismatchError` if arrays hold other kinds of number than the module's `own` tensors, as told."""
    words = {"f": "float", "i": "int", "b": "bool"}
    told = [(name, given[name].dtype, kind) for name, kind in zip(own, kinds, strict=False) if kind in words]
    differ = {name: (dtype_name(dtype), words[kind]) for name, dtype, kind in told if kind_of(dtype) != kind}
    if differ:
        raise WeightsMismatchError([], [], {}, module_id, dtypes=differ)


def fit_published(arrays: Arrays, modules: Mapping[str, Shapes], kinds: ModuleKinds | None = None) -> Arrays:
    """Return `arrays` under the names that workers with these `modules` have for them.

    A module that is left out keeps its weights. State of connectors is not checked here. Raises `WeightsMismatchError`
    or `ModuleError` if workers cannot load the arrays.
    """
    by_module = split_modules(arrays)
    given: Mapping[str, Arrays]
    if by_module is not None:
        given = by_module
    elif len(modules) == 1:
        given = {next(iter(modules)): arrays}
    else:
        raise which_module_error(None, modules)
    fitted: dict[str, Arrays] = {}
    for module_id, own in given.items():
        if module_id not in modules:
            raise which_module_error(module_id, modules)
        learnt = {name: array for name, array in own.items() if name.startswith(CONNECTORS)}
        tensors = {name: array for name, array in own.items() if name not in learnt}
        if tensors:
            tensors = dict(fit_names(tensors, modules[module_id]))
            shapes = {name: array.shape for name, array in tensors.items()}
            which = module_id if len(modules) > 1 else ""
            check_shapes(shapes, modules[module_id], which)
            _check_kinds(tensors, modules[module_id], (kinds or {}).get(module_id, ""), which)
        fitted[module_id] = {**tensors, **learnt}
    return next(iter(fitted.values())) if by_module is None else join_modules(fitted)


def merge_published(whole: Arrays, part: Arrays) -> Arrays:
    """Return `whole` with the arrays of `part`, whose names may be those of a wrapper, in place of its own.

    What is one array in `whole`, as tied parameters are, changes under all its names. State of connectors may be new,
    and is not checked. Raises `WeightsMismatchError` for other names that `whole` does not have, and for other shapes
    or kinds of number.
    """
    bare = {_without_wrappers(name): name for name in whole}
    named = {name if name in whole else bare.get(_without_wrappers(name), name): array for name, array in part.items()}
    tensors = {name: array for name, array in named.items() if f"/{CONNECTORS}" not in f"/{name}"}
    own = {name: whole[name].shape for name in tensors if name in whole}
    check_shapes({name: array.shape for name, array in tensors.items()}, own)
    _check_kinds(tensors, own, "".join(kind_of(whole[name].dtype) for name in own), "")
    tied = {id(whole[name]): array for name, array in tensors.items()}
    return {**{name: tied.get(id(array), array) for name, array in whole.items()}, **named}


def merge_received(header: WeightsHeader, digest: str, whole: Arrays, part: Arrays) -> Arrays:
    """Return the version of which `part` came, where `whole`, with that digest, is its base. Else no arrays."""
    if header.base != digest or part.keys() - whole.keys():
        return {}
    known: dict[Any, NDArray[Any]] = {}
    arrays = {**whole, **part}
    for name, array in arrays.items():  # tied ones came as several views of the same bytes
        at = array.__array_interface__["data"][0], array.dtype, array.shape
        arrays[name] = known.setdefault(at, array)
    return arrays


def weights_digest(arrays: Arrays, hasher: Digest | None = None) -> str:
    """Return xxh3-128 over names, dtypes, shapes and bytes, in the order of names: 32 hexadecimal digits."""
    hasher = hasher or xxhash.xxh3_128()
    deque(take_digest(arrays, hasher, dict.fromkeys(arrays, 0)), maxlen=0)
    return hasher.hexdigest()


def has_digest(arrays: Arrays, digest: str) -> bool:
    """Return whether `digest` is that of `arrays`. Learners of wire 1.0 give blake2b-128 of the same bytes."""
    earlier = hashlib.blake2b(digest_size=16)
    return digest == weights_digest(arrays) or digest == weights_digest(arrays, earlier)


def take_digest(arrays: Arrays, hasher: Digest, starts: Mapping[str, int]) -> Iterator[int]:
    """Hash arrays that may still be arriving. Yield before each step how many of all bytes must be there."""
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        code = array.dtype.names[0] if array.dtype.names else array.dtype.str
        hasher.update(f"{name}\0{code}\0{array.shape}\0".encode())
        data: Any = array.reshape(-1).view(np.uint8)
        for at in range(0, len(data), _STEP_BYTES):
            yield starts[name] + min(at + _STEP_BYTES, len(data))
            hasher.update(data[at : at + _STEP_BYTES])


def encode_weights(fleet_id: str, version: Version, arrays: Arrays, digest: str = "", base: str = "") -> list[Buffer]:
    """Return the frames of a WEIGHTS message. `digest` is that of the arrays, where it is known already.

    With `base`, they are what differs from the version of that digest, and `digest` is that of the whole.

    Raises `EncodeError` for a dtype that may not go on the wire.
    """
    header = WeightsHeader(fleet_id=fleet_id, version=version, digest=digest or weights_digest(arrays), base=base)
    return encode_packed(MessageKind.WEIGHTS, header.model_dump(), *pack_weights(arrays))


def pack_weights(arrays: Arrays) -> tuple[list[Buffer], list[list[Any]]]:
    """Return what `pack` does of arrays, laid out by `lay_out_weights`."""
    joined, own, manifest = lay_out_weights(arrays)
    return [*([b"".join(joined)] if joined else []), *own], manifest


def lay_out_weights(arrays: Arrays) -> tuple[list[Any], list[Buffer], list[list[Any]]]:
    """Return what `lay_out` does of arrays in the order of their names. One that stands under two names is sent once.

    A receiver can take the digest while they come.
    """
    first = {id(array): name for name, array in sorted(arrays.items(), reverse=True)}
    joined, own, manifest = lay_out({name: arrays[name] for name in sorted(first.values())})
    if len(first) < len(arrays):
        rows = {row[0]: row[1:] for row in manifest}
        manifest = [[name, *rows[first[id(array)]]] for name, array in sorted(arrays.items())]
    return joined, own, manifest


def nbytes_of(arrays: Arrays) -> int:
    """Return the bytes of arrays, of one under two names once."""
    return sum(array.nbytes for array in {id(array): array for array in arrays.values()}.values())


def read_weights(message: WireMessage) -> tuple[WeightsHeader, Arrays]:
    """Return header and arrays of a decoded WEIGHTS message; no arrays when it only announces a version.

    Raises `DecodeError` when the arrays do not match the digest. A part has that of the whole, which the broker checks.
    """
    header = read(WeightsHeader, message.header)
    if message.arrays and not header.base:
        check_digest(header, message.arrays)
    return header, message.arrays


def check_digest(header: WeightsHeader, arrays: Arrays) -> None:
    """Raise `DecodeError` unless the header's digest is that of the arrays which came."""
    if not has_digest(arrays, header.digest):
        raise DecodeError("weights_digest", f"weights {header.version} do not match their digest")
