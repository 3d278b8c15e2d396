"""Observations of many clients that are read together equal observations read one by one; so do refusals."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.spaces import Box, Dict, Discrete, Space, Tuple, column_dtype, leaf_shape, leaves
from headrace.schemas.errors import EnvContractError
from headrace.workers.serving.serving_messages import EpisodeStep
from headrace.workers.serving.space_codec import SpaceCodec, row_or_error

BEYOND = float(np.finfo(np.float32).max) * 2
NEARLY = float(np.finfo(np.float32).max) * (1 + 2**-26)
"""Rounded to what a float32 holds."""
ODD: list[Any] = [
    None,
    "1",
    True,
    [],
    {},
    [[]],
    math.nan,
    math.inf,
    -math.inf,
    BEYOND,
    NEARLY,
    -0.0,
    2**63,
    -(2**63),
    0.1,
    -7,
]
SPACES: list[Space] = [
    Box(shape=(2,), dtype="<f4"),
    Box(shape=(2,), dtype="<f4", low=-1.0, high=1.0),
    Box(shape=(2,), dtype="<f8", low=0.1),
    Box(shape=(2,), dtype="<f4", low=[-1.0, -math.inf], high=[math.inf, 3.0]),
    Box(shape=(), dtype="<f4", high=5.0),
    Box(shape=(2, 2), dtype="<f2"),
    Box(shape=(2,), dtype="<i4", low=-9, high=9),
    Discrete(n=3),
    Dict(spaces={"a": Box(shape=(2,), dtype="<f4"), "b": Discrete(n=2)}),
    Tuple(spaces=(Box(shape=(2,), dtype="<f4"),)),
]


def one_by_one(values: SpaceCodec, told: list[Any]) -> list[Any]:
    found: list[Any] = []
    for value in told:
        try:
            found.append(values.read_row(value))
        except EnvContractError as error:
            found.append(error)
    return found


def plain(rows: list[Any]) -> list[Any]:
    """Return the rows as values that `==` compares: arrays by dtype, shape and bytes, errors by their text."""
    return [
        str(row)
        if isinstance(row, EnvContractError)
        else {name: (a.dtype, a.shape, a.tobytes()) for name, a in row.items()}
        for row in rows
    ]


def told_of(space: Space, rng: random.Random) -> Any:
    """Mostly sound."""
    if rng.random() < 0.05:
        return rng.choice(ODD)
    match space:
        case Dict():
            return {key: told_of(sub, rng) for key, sub in space.spaces.items()}
        case Tuple():
            return [told_of(sub, rng) for sub in space.spaces]
        case Box():
            row = np.array([rng.choice([0, 1, 0.25, rng.uniform(0.1, 1)]) for _ in range(math.prod(space.shape))])
            flat = row.tolist()
            if flat and rng.random() < 0.1:
                flat[-1] = rng.choice(ODD)
            if math.prod(space.shape) == 4:
                return [flat[:2], flat[2:]]
            return flat if space.shape else flat[0]
        case _:
            return rng.randrange(3)


@pytest.mark.parametrize("check_bounds", [True, False])
@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_rows_read_together_equal_rows_read_one_by_one(space: Space, check_bounds: bool) -> None:
    values, rng = SpaceCodec(space, "obs", check_bounds=check_bounds), random.Random(0)
    for _ in range(400):
        told = [told_of(space, rng) for _ in range(rng.choice((0, 1, 2, 5)))]
        assert plain(values.read_rows(told)) == plain(one_by_one(values, told)), told


@pytest.mark.parametrize("check_bounds", [True, False])
@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_messages_read_together_equal_messages_read_one_by_one(space: Space, check_bounds: bool) -> None:
    values, rng = SpaceCodec(space, "obs", check_bounds=check_bounds), np.random.default_rng(0)
    assert values.layout is not None
    refused = 0
    for _ in range(200):
        said = [arrays_of(space, rng) for _ in range(rng.integers(1, 6))]
        frames = [values.layout.encode(EpisodeStep.KIND, {}, arrays) for arrays in said]
        alone: list[Any] = [row_or_error(values.row_from_arrays, arrays) for arrays in said]
        assert plain(list(values.rows_from_payloads([bytes(parts[2]) for parts in frames]))) == plain(alone)
        refused += sum(isinstance(row, EnvContractError) for row in alone)
    assert refused or not check_bounds


@pytest.mark.parametrize("space", SPACES[:6], ids=repr)
@pytest.mark.parametrize("lists", [1, 2, 30])
def test_huge_text_in_place_of_numbers_is_refused_like_short_text(space: Space, lists: int) -> None:
    values, told = SpaceCodec(space, "obs"), ["a" * 1_000_000] + ["b"] * 1_000_000
    for _ in range(lists - 1):
        told = [told]  # type: ignore[list-item]
    short = ["a"] * 3
    refused = values.read_rows([told, short, short])
    assert [str(error) for error in refused] == [str(row_or_error(values.read_row, short))] * 3
    assert "got text" in str(refused[0])


def arrays_of(space: Space, rng: np.random.Generator) -> dict[str, Any]:
    """Mostly sound."""
    found = {}
    for name, leaf in leaves(space, "obs"):
        array = np.asarray(rng.uniform(0.2, 1.0, leaf_shape(leaf))).astype(column_dtype(leaf))
        if rng.random() < 0.2:
            array[...] = rng.choice([-50, 99, math.nan]) if array.dtype.kind == "f" else rng.choice([-50, 99])
        found[name] = array
    return found
