"""Bytes of real Breakout frames as they travel between machines, and what lz4 costs a worker and a learner.

The envs play at random, as the recipe `breakout` has them: frames of 84 x 84, four to an observation, 64 steps of each
env in a batch. `plain` is the same batch without compression. A ratio of bytes is how many times fewer there are; those
of time are of single calls in turns, by processor time.

PYTHONPATH=tests python -m bench.run --only compression
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from statistics import median
from time import process_time_ns

from bench.table import Row
from headrace.deploy.run.options import RECIPES
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.frames.wire import decode
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner

ENVS = (1, 8)
_WARM_UP = 4
"""Batches before the one that counts, so that most envs are in the middle of a game."""
_CALLS = 20
MARK = 20.0
"""The target: so many times fewer bytes."""


def measure(rounds: int) -> list[Row]:
    """Return rows of bytes, of encoding and of decoding, for each number of envs."""
    return [row for envs in ENVS for row in _rows(_played(envs), f"Breakout, {envs} x 64 steps", rounds)]


def _played(envs: int) -> ChunkBatch:
    recipe = tomllib.loads((RECIPES / "breakout.toml").read_text())["sampling"]
    runner = SingleAgentEnvRunner(EnvRunnerConfig(**{**recipe, "num_envs": envs, "seed": 0}))
    try:
        for _ in range(_WARM_UP):
            runner.sample_fragment(random_actions=True)
        return runner.sample_fragment(random_actions=True)
    finally:
        runner.stop()


def _rows(batch: ChunkBatch, case: str, rounds: int) -> list[Row]:
    names = {"agents": list(batch.agents), "modules": list(batch.modules), "reasons": list(batch.reasons)}
    counts = {"slot": 0, "incarnation": 1, "seq": 1, "steps": batch.steps, "chunks": len(batch)}
    header = BatchHeader(fleet_id="bench", totals=WorkerTotals(), **counts, **names)
    plain, packed = encode_batch(batch, header), encode_batch(batch, header, compressed=True)
    sizes = [sum(map(len, frames)) for frames in (plain, packed)]
    ratio = sizes[0] / sizes[1]
    return [
        Row("compression", case, "plain", "bytes", sizes[0], 1.0, 1.0, 1.0),
        Row("compression", case, "lz4", "bytes", sizes[1], ratio, ratio, ratio, mark=MARK),
        *_times(
            f"{case}, encode",
            lambda: encode_batch(batch, header),
            lambda: encode_batch(batch, header, compressed=True),
            rounds,
        ),
        *_times(f"{case}, decode", lambda: decode(plain), lambda: decode(packed), rounds),
    ]


def _times(case: str, plain: Callable[[], object], packed: Callable[[], object], rounds: int) -> list[Row]:
    """Return rows of calls a second of both, in turns."""
    turns = [(_seconds(plain), _seconds(packed)) for _ in range(rounds)]
    ratios = [of_plain / of_packed for of_plain, of_packed in turns]
    ratio = median(ratios)
    rates = [1.0 / median(each) for each in zip(*turns, strict=True)]
    return [
        Row("compression", case, "plain", "1/s", rates[0], 1.0, 1.0, 1.0, 1.0),
        Row("compression", case, "lz4", "1/s", rates[1], ratio, min(ratios), max(ratios), ratio),
    ]


def _seconds(call: Callable[[], object]) -> float:
    """Return the processor time of one call, as the mean of some."""
    began = process_time_ns()
    for _ in range(_CALLS):
        call()
    return (process_time_ns() - began) / 1e9 / _CALLS
