"""Spaces as data: column names, nesting, and refusal of descriptions that make no sense."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from golden_samples import SPACES
from pydantic import ValidationError

from headrace.schemas.chunks.spaces import (
    MAX_DEPTH,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Spaces,
    Tuple,
    column_dtype,
    leaf_shape,
    leaf_size,
    leaves,
    nest,
    spaces_from_json,
)
from headrace.schemas.errors import DecodeError


@pytest.mark.parametrize("family", SPACES)
def test_a_space_survives_json(family: str) -> None:
    observation, action = SPACES[family]
    pair = Spaces(observation=observation, action=action)
    assert spaces_from_json(orjson.loads(orjson.dumps(pair.model_dump()))) == pair


def test_leaves_name_columns_in_the_spaces_own_order() -> None:
    space = SPACES["nested"][0]
    assert [name for name, _ in leaves(space, "obs")] == ["obs/arm/0", "obs/arm/1", "obs/a/b"]
    assert [name for name, _ in leaves(Discrete(n=2), "actions")] == ["actions"]
    assert list(leaves(Dict(spaces={}), "obs")) == []


def test_nest_gives_the_users_nesting_back() -> None:
    space = SPACES["nested"][0]
    columns = {name: np.full(2, i) for i, (name, _) in enumerate(leaves(space, "obs"))}
    nested = nest(space, columns, "obs")
    assert nested["arm"][1] is columns["obs/arm/1"]
    assert nested["a/b"] is columns["obs/a/b"]
    assert nest(Tuple(spaces=(Dict(spaces={}),)), {}, "obs") == ({},)


def test_leaves_have_the_shape_size_and_dtype_of_a_row() -> None:
    assert leaf_shape(Discrete(n=3)) == ()
    assert leaf_shape(MultiDiscrete(nvec=(2, 3), start=(0, 0), shape=(2,))) == (2,)
    assert leaf_size(Box(shape=(2, 3), dtype="<f4")) == 6
    assert leaf_size(Box(shape=(), dtype="<f4")) == 1
    assert column_dtype(MultiBinary(shape=(2,))) == np.int8


def _nested(levels: int) -> Any:
    space: Any = {"kind": "box", "shape": [2], "dtype": "<f4", "low": [0.0, None]}
    for i in range(levels):
        space = {"kind": "dict", "spaces": {"x": space}} if i % 2 else {"kind": "tuple", "spaces": [space]}
    return space


def test_the_deepest_space_is_read_and_one_deeper_is_not() -> None:
    assert spaces_from_json({"observation": _nested(MAX_DEPTH), "action": _nested(0)})
    for levels in (MAX_DEPTH + 1, 30):
        with pytest.raises(DecodeError, match="deeper than 8 levels"):
            spaces_from_json({"observation": _nested(levels), "action": _nested(0)})


BAD = [
    {"kind": "box", "shape": [2], "dtype": "O"},
    {"kind": "box", "shape": [2], "dtype": ">f4"},
    {"kind": "box", "shape": [-1], "dtype": "<f4"},
    {"kind": "box", "shape": [2**40], "dtype": "<f4"},
    {"kind": "box", "shape": [1] * 8, "dtype": "<f4"},
    {"kind": "box", "shape": [2], "dtype": "<f4", "low": [0.0]},
    {"kind": "discrete", "n": 0},
    {"kind": "discrete", "n": 2**63},
    {"kind": "discrete", "n": 1, "start": -(2**64)},
    {"kind": "discrete", "n": 1, "code": "os:system"},
    {"kind": "multi_discrete", "nvec": [2], "start": [0, 0], "shape": [1]},
    {"kind": "multi_discrete", "nvec": [0], "start": [0], "shape": [1]},
    {"kind": "multi_binary", "shape": 3},
    {"kind": "text"},
    {"kind": "dict", "spaces": []},
    {"spaces": {}},
    {"kind": "dict", "spaces": {"a/b": _nested(0), "a": {"kind": "dict", "spaces": {"b": _nested(0)}}}},
    [],
    None,
    7,
]


@pytest.mark.parametrize("value", BAD, ids=lambda value: str(value)[:50])
def test_a_description_that_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises(DecodeError) as caught:
        spaces_from_json({"observation": value, "action": _nested(0)})
    assert caught.value.reason == "bad_space"


def test_a_space_is_checked_when_it_is_built() -> None:
    leaf = Box(shape=(), dtype="<f4")
    with pytest.raises(ValidationError, match="same column name"):
        Dict(spaces={"a/0": leaf, "a": Tuple(spaces=(leaf,))})
    with pytest.raises(ValidationError, match="may not go on the wire"):
        Box(shape=(), dtype="<c8")


def test_a_space_is_read_as_gymnasiums() -> None:
    arm = Box(shape=(2, 2), dtype="<f4", low=-1.0, high=(1.0, None, 3.0, 4.0))
    choice = MultiDiscrete(nvec=(2, 3), start=(0, -1), shape=(2,))
    space = Dict(spaces={"vector": arm, "pair": Tuple(spaces=(choice, Discrete(n=4)))})
    assert list(space) == list(space.keys()) == ["vector", "pair"]
    assert (len(space), "vector" in space, "other" in space) == (2, True, False)
    assert dict(space.items())["vector"] is space["vector"] is next(iter(space.values())) is arm
    pair = space["pair"]
    assert isinstance(pair, Tuple)
    assert (len(pair), pair[0], list(pair)[1].shape) == (2, choice, ())
    assert (arm.low.dtype, arm.high.tolist()) == (np.float32, [[1.0, np.inf], [3.0, 4.0]])
    assert (choice.nvec.tolist(), (choice.start + choice.nvec).tolist()) == ([2, 3], [2, 2])
    assert repr(arm) == "Box(kind='box', shape=(2, 2), dtype='<f4', low=-1.0, high=(1.0, None, 3.0, 4.0))"


@pytest.mark.parametrize("dtype", ["|u1", "|i1", "<i4", "<u4", "<i8", "<u8"])
def test_bounds_of_integers_are_in_their_dtype(dtype: str) -> None:
    whole = np.iinfo(dtype)
    free, bound = Box(shape=(1,), dtype=dtype), Box(shape=(1,), dtype=dtype, low=3.0, high=7.0)
    assert [(b.low[0], b.high[0]) for b in (free, bound)] == [(whole.min, whole.max), (3, 7)]
    assert free.low.dtype == free.high.dtype == dtype
