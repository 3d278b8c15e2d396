"""Every random number of a runner, from one tree of seeds: no two envs of a fleet share a stream.

    root entropy ── (worker_index, incarnation, env_index) ──┬── reset seeds, one an episode
                                                             ├── numbers a policy samples from
                                                             ├── numbers random actions are made from
                                                             └── seeds for objects that are seeded when they are made

The episodes of an env therefore depend on its own streams and the weights. They never depend on its neighbours, the
size of the vector or which env was ready first. They touch no global state of python, numpy or torch.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import StateError

BLOCK = 64
"""Numbers drawn from a stream at once."""
EPISODE_BITS = 48
"""Low bits of an episode id that count the episodes of one env; the 16 bits above them are the env's index."""


NoiseKind = Literal["uniform", "normal"]
NoiseUse = Literal["policy", "random_actions"]
SEAT_USES: dict[NoiseUse, int] = {"policy": 1, "random_actions": 2}
"""The use of a seat's stream, and the child of its env's branch that it belongs to."""


class SeedTree:
    """The streams of one incarnation of a runner. To repeat a run, pass its `entropy` as `seed`."""

    def __init__(self, seed: int | None, worker_index: int, incarnation: int, num_envs: int) -> None:
        self.entropy = secrets.randbits(128) if seed is None else seed
        self.seats = SeatStreams(self.entropy, worker_index, incarnation)
        children = [
            np.random.SeedSequence(self.entropy, spawn_key=(worker_index, incarnation, env_index)).spawn(3)
            for env_index in range(num_envs)
        ]
        self.makings = MakingSeeds(self.entropy, worker_index, incarnation)
        streams = [[np.random.Generator(np.random.PCG64(child)) for child in row] for row in children]
        self.resets, self.policy, self.random_actions = (list(column) for column in zip(*streams, strict=True))


class SeatStreams:
    """Streams of the seats of envs with several agents, each made on first use.

    A seat's stream is a child of the env's own stream for the same use. Module and agent identify it.
    """

    def __init__(self, entropy: int, worker_index: int, incarnation: int) -> None:
        self.entropy, self.incarnation = entropy, incarnation
        self._worker_index = worker_index
        self.known: dict[tuple[int, ...], np.random.Generator] = {}
        """The streams made so far, by (env, use, module, agent)."""

    def of(self, use: NoiseUse, env_index: int, module: int, agent: int) -> np.random.Generator:
        """Return the seat's stream. A later call, as by a rebuilt module, continues it and does not repeat it."""
        return self.at((env_index, SEAT_USES[use], module, agent))

    def at(self, key: tuple[int, ...]) -> np.random.Generator:
        """Return the stream at `key`, in the form of the keys of `known`."""
        if key not in self.known:
            sequence = np.random.SeedSequence(self.entropy, spawn_key=(self._worker_index, self.incarnation, *key))
            self.known[key] = np.random.Generator(np.random.PCG64(sequence))
        return self.known[key]

    def restart(self, entropy: int, incarnation: int) -> None:
        """Restart from another root. Call it before any stream is used."""
        self.entropy, self.incarnation = entropy, incarnation
        self.known.clear()


class EnvSeeds:
    """Seeds for `env.reset` of one env, in [0, max_seed]: one for each episode, or for its first alone."""

    def __init__(self, stream: np.random.Generator, max_seed: int, *, every_episode: bool = True) -> None:
        self.stream = stream
        self.ahead: list[int] = []
        """Seeds drawn and not handed out yet; the next one is last."""
        self._max_seed = max_seed
        self._every_episode = every_episode
        self._is_due = True
        """True if the next reset gets a seed."""

    def renew(self) -> None:
        """Give the next reset a seed, because the env is new, or must begin as a new one would."""
        self._is_due = True

    def next(self) -> int | None:
        """Return the seed of the next reset, or None if the env goes on with its own random numbers.

        A seed repeats an earlier one only by chance: about n²/2m pairs among n seeds of a fleet, m being max_seed + 1.
        """
        if self.peek() is None:
            return None
        self._is_due = self._every_episode
        return self.ahead.pop()

    def peek(self) -> int | None:
        """Return the result of the next call of `next`."""
        if not self._is_due:
            return None
        if not self.ahead:
            self.ahead = self.stream.integers(0, self._max_seed, BLOCK, dtype=np.int64, endpoint=True).tolist()[::-1]
        return self.ahead[-1]


class MakingSeeds:
    """Seeds for envs that can be seeded only when they are made: a new one each time."""

    def __init__(self, entropy: int, worker_index: int, incarnation: int) -> None:
        self._entropy = entropy
        self._key = (worker_index, incarnation)
        self._streams: dict[int, np.random.Generator] = {}

    def next(self, env_index: int, num_envs: int, max_seed: int) -> int:
        """Return a seed for env `env_index` of `num_envs`; even with `num_envs` added it is at most `max_seed`."""
        if env_index not in self._streams:
            sequence = np.random.SeedSequence(self._entropy, spawn_key=(*self._key, env_index, 3))
            self._streams[env_index] = np.random.Generator(np.random.PCG64(sequence))
        return int(self._streams[env_index].integers(0, max(max_seed - num_envs, 1), dtype=np.int64))


class NoiseBlocks:
    """Random numbers for one forward pass after another: float32 (envs, size), row i from stream i alone.

    A block is drawn ahead for each env. Every pass uses up a row of each env, even of one that waits to be rebuilt.
    """

    def __init__(self, streams: Sequence[np.random.Generator], size: int, kind: NoiseKind) -> None:
        self.streams = streams
        self.size, self.kind = size, kind
        self._block = np.empty((BLOCK, len(streams), size), np.float32)
        self._at = BLOCK

    def next(self) -> NDArray[np.float32]:
        """Return numbers in [0, 1), or standard normal ones. The result is a view that a later pass overwrites."""
        if self._at == BLOCK:
            self._refill()
        row: NDArray[np.float32] = self._block[self._at]
        self._at += 1
        return row

    def read(self) -> dict[str, Any]:
        """Return "ahead", float32 (passes, envs, size): numbers drawn and not used yet."""
        return {"ahead": self._block[self._at :].copy()}

    def check(self, name: str, state: Any, rows: int) -> None:
        """Raise `StateError` unless `state`, called `name`, is that of `rows` rows of such numbers."""
        ahead = check_array(state, name, "ahead", np.float32, (None, rows, self.size))
        if len(ahead) > BLOCK:
            raise StateError(f"random_streams/{name}/ahead has {len(ahead)} passes; {BLOCK} are drawn at once")

    def write(self, ahead: NDArray[np.float32]) -> None:
        """Continue from the state of `read`."""
        self._at = BLOCK - len(ahead)
        self._block[self._at :] = ahead

    def _refill(self) -> None:
        shape = (BLOCK, self._block.shape[2])
        for lane, stream in enumerate(self.streams):
            if self.kind == "normal":
                self._block[:, lane] = stream.standard_normal(shape, dtype=np.float32)
            else:
                self._block[:, lane] = stream.random(shape, dtype=np.float32)
        self._at = 0


def draw_global_seeds() -> None:
    """Seed the global generators of NumPy and torch: forked copies would share them. Python reseeds its own at a fork.

    torch is seeded only if it is imported. Generators that a user's module has made are not reached.
    """
    np.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def episode_id_high(run_uid: str, entropy: int, worker_index: int, incarnation: int) -> int:
    """Return the upper 64 bits of a runner's episode ids.

    Without a `run_uid` they are random, so that ids never repeat.
    """
    if not run_uid:
        return secrets.randbits(64)
    name = f"{run_uid}\0{entropy}\0{worker_index}\0{incarnation}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


_LOW = (1 << 64) - 1


def read_streams(streams: Sequence[np.random.Generator]) -> NDArray[np.uint64]:
    """Return uint64 (streams, 6): high and low half of state and increment, and the half word PCG64 may hold back."""
    rows = []
    for stream in streams:
        known: Any = stream.bit_generator.state
        words, inc = known["state"]["state"], known["state"]["inc"]
        rows.append((words >> 64, words & _LOW, inc >> 64, inc & _LOW, known["has_uint32"], known["uinteger"]))
    return np.array(rows, np.uint64)


def write_streams(streams: Sequence[np.random.Generator], rows: NDArray[np.uint64]) -> None:
    """Set `streams` to the state of `read_streams`."""
    for stream, row in zip(streams, rows.tolist(), strict=True):
        stream.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": row[0] << 64 | row[1], "inc": row[2] << 64 | row[3]},
            "has_uint32": row[4],
            "uinteger": row[5],
        }


def check_array(state: Any, name: str, array: str, dtype: Any, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """Return `state[array]` if it has this dtype and shape, where None is any number; else raise `StateError`."""
    found = state.get(array) if isinstance(state, Mapping) else None
    if (
        isinstance(found, np.ndarray)
        and found.dtype == dtype
        and len(found.shape) == len(shape)
        and all(wanted in (None, seen) for wanted, seen in zip(shape, found.shape, strict=True))
    ):
        return found
    seen = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else repr(found)
    raise StateError(
        f"random_streams/{name}/{array} should be {np.dtype(dtype)} {shape}, got {seen:.80}: the state is of a runner "
        "with another module or other spaces"
    )
