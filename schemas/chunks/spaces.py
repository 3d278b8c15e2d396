"""Spaces as data: the form of an observation or action, without gymnasium and without code.

A `Space` is a tree of leaves. Its JSON form travels in HELLO and WELCOME, so a learner can build its module before the
first chunk arrives. A nested space is flattened into named columns: the leaf at `Dict(arm=Tuple(Box, Discrete))` under
root `obs` is the column `obs/arm/0`, and `nest` rebuilds the user's own nesting from such columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_serializer, model_validator

from headrace.schemas.errors import DecodeError, ModuleError
from headrace.schemas.frames.wire import ALLOWED_DTYPES, DEFAULT_LIMITS

_MODEL = ConfigDict(frozen=True, extra="forbid")
MAX_DEPTH = 8
"""Levels of Dict and Tuple above a leaf."""


def _wire_dtype(name: str) -> str:
    if name not in ALLOWED_DTYPES:
        raise ValueError(f"dtype {name!r:.40} may not go on the wire")
    return name


Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
DType = Annotated[str, AfterValidator(_wire_dtype)]
Shape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...], Field(max_length=DEFAULT_LIMITS.dims - 1)]
"""Shape of one row; a column has one more axis."""


class _FlatSpace(BaseModel):
    """A space that is told, and shown, by the arguments that build it: flat lists under the names of its arrays."""

    model_config = _MODEL

    @model_serializer
    def _as_built(self) -> dict[str, Any]:
        return {field.alias or name: getattr(self, name) for name, field in type(self).model_fields.items()}

    def __repr_args__(self) -> Any:
        return self._as_built().items()


class Box(_FlatSpace):
    """Real-valued array.

    It is built of `low` and `high` that are scalars when every element shares them, else flat lists in C order; None is
    infinite. They are read as arrays, as in gymnasium.
    """

    kind: Literal["box"] = "box"
    shape: Shape
    dtype: DType
    flat_low: float | tuple[float | None, ...] | None = Field(default=None, alias="low")
    flat_high: float | tuple[float | None, ...] | None = Field(default=None, alias="high")

    @property
    def low(self) -> NDArray[Any]:
        """Return the lowest value of each element, in the space's shape and dtype."""
        return exact_bound(box_bounds(self)[0], np.dtype(self.dtype))

    @property
    def high(self) -> NDArray[Any]:
        """Return the highest value of each element, in the space's shape and dtype."""
        return exact_bound(box_bounds(self)[1], np.dtype(self.dtype))

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, bound in (("low", self.flat_low), ("high", self.flat_high)):
            if isinstance(bound, tuple) and len(bound) != math.prod(self.shape):
                raise ValueError(f"{name} has {len(bound)} elements, shape {self.shape} {math.prod(self.shape)}")
        return self


class Discrete(BaseModel):
    """One integer in [start, start + n)."""

    model_config = _MODEL
    kind: Literal["discrete"] = "discrete"
    n: Int64 = Field(gt=0)
    start: Int64 = 0
    dtype: DType = "<i8"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (), as an action is one number."""
        return ()


class MultiDiscrete(_FlatSpace):
    """Several integers; element i is in [start[i], start[i] + nvec[i]).

    It is built of both as flat lists, in C order of `shape`. They are read as arrays, as in gymnasium.
    """

    kind: Literal["multi_discrete"] = "multi_discrete"
    flat_nvec: tuple[Annotated[Int64, Field(gt=0)], ...] = Field(alias="nvec")
    flat_start: tuple[Int64, ...] = Field(alias="start")
    shape: Shape
    dtype: DType = "<i8"

    @property
    def nvec(self) -> NDArray[np.int64]:
        """Return the number of values of each element, in the space's shape."""
        return np.array(self.flat_nvec, np.int64).reshape(self.shape)

    @property
    def start(self) -> NDArray[np.int64]:
        """Return the lowest value of each element, in the space's shape."""
        return np.array(self.flat_start, np.int64).reshape(self.shape)

    @model_validator(mode="after")
    def _check(self) -> Self:
        nvec, start = len(self.flat_nvec), len(self.flat_start)
        if not nvec == start == math.prod(self.shape):
            raise ValueError(f"nvec has {nvec} elements, start {start}, shape {self.shape}")
        return self


class MultiBinary(BaseModel):
    """Array of zeros and ones."""

    model_config = _MODEL
    kind: Literal["multi_binary"] = "multi_binary"
    shape: Shape
    dtype: DType = "|i1"


class Dict(BaseModel):
    """Named sub-spaces. A name may hold slashes, as dm_control's do, as long as no two leaves share a column.

    It is read as a dict, as in gymnasium.
    """

    model_config = _MODEL
    kind: Literal["dict"] = "dict"
    spaces: dict[str, Space]

    def __getitem__(self, key: str) -> Space:
        return self.spaces[key]

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(self.spaces)

    def __len__(self) -> int:
        return len(self.spaces)

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self.spaces.keys()

    def values(self) -> ValuesView[Space]:
        """Return the sub-spaces."""
        return self.spaces.values()

    def items(self) -> ItemsView[str, Space]:
        """Return names and sub-spaces."""
        return self.spaces.items()

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_nesting(self)
        names = [name for name, _ in leaves(self, "")]
        if len(set(names)) != len(names):
            raise ValueError("two leaves have the same column name; rename a key with a slash in it")
        return self


class Tuple(BaseModel):
    """Numbered sub-spaces. It is read as a tuple, as in gymnasium."""

    model_config = _MODEL
    kind: Literal["tuple"] = "tuple"
    spaces: tuple[Space, ...]

    def __getitem__(self, index: int) -> Space:
        return self.spaces[index]

    def __iter__(self) -> Iterator[Space]:  # type: ignore[override]
        return iter(self.spaces)

    def __len__(self) -> int:
        return len(self.spaces)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_nesting(self)
        return self


Leaf = Box | Discrete | MultiDiscrete | MultiBinary
Space = Annotated[Box | Discrete | MultiDiscrete | MultiBinary | Dict | Tuple, Field(discriminator="kind")]
Dict.model_rebuild()
Tuple.model_rebuild()


def _check_nesting(space: Space) -> None:
    if _depth(space) > MAX_DEPTH:
        raise ValueError(f"a space nested deeper than {MAX_DEPTH} levels")


def _depth(space: Space) -> int:
    if isinstance(space, Dict):
        return 1 + max(map(_depth, space.spaces.values()), default=0)
    if isinstance(space, Tuple):
        return 1 + max(map(_depth, space.spaces), default=0)
    return 0


class Spaces(BaseModel):
    """Observation and action space of one module."""

    model_config = _MODEL
    observation: Space
    action: Space

    def to_gymnasium(self) -> tuple[Any, Any]:
        """Return (observation space, action space) as gymnasium's. Needs gymnasium, which nothing else here does."""
        from headrace.schemas.chunks.gymnasium_spaces import to_gym

        return to_gym(self.observation), to_gym(self.action)

    def check_gymnasium(self, observation: Any, action: Any, owner: str) -> None:
        """Raise `ModuleError` unless `owner`, which has these spaces of gymnasium, fits.

        Observations of floats may have other bounds. All else must be equal. Needs gymnasium, as `to_gymnasium` does.
        """
        from headrace.schemas.chunks.gymnasium_spaces import is_alike

        for kind, own, its in zip(("observation", "action"), self.to_gymnasium(), (observation, action), strict=True):
            if not is_alike(own, its, any_bounds=kind == "observation"):
                raise ModuleError(
                    f"{owner} has the {kind} space {its!s:.200}, and the fleet's is {own!s:.200}; build it for the env "
                    "and the connectors of the fleet"
                )


def leaf_shape(leaf: Leaf) -> tuple[int, ...]:
    """Return the shape of one row of the leaf's column; () for Discrete."""
    return leaf.shape


def leaf_size(leaf: Leaf) -> int:
    """Return the number of elements of one row."""
    return math.prod(leaf_shape(leaf))


def leaves(space: Space, root: str) -> Iterator[tuple[str, Leaf]]:
    """Yield (column name, leaf) for each leaf below `space`, in the space's order. A bare leaf's column is `root`."""
    if isinstance(space, Dict):
        for key, sub in space.spaces.items():
            yield from leaves(sub, f"{root}/{key}")
    elif isinstance(space, Tuple):
        for index, sub in enumerate(space.spaces):
            yield from leaves(sub, f"{root}/{index}")
    else:
        yield root, space


def map_leaves(space: Space, change: Callable[[str, Leaf], Space], root: str) -> Space:
    """Return `space` with each leaf replaced by what `change` returns for its column name and itself."""
    if isinstance(space, Dict):
        return Dict(spaces={key: map_leaves(sub, change, f"{root}/{key}") for key, sub in space.spaces.items()})
    if isinstance(space, Tuple):
        parts = enumerate(space.spaces)
        return Tuple(spaces=tuple(map_leaves(sub, change, f"{root}/{index}") for index, sub in parts))
    return change(root, space)


def leaf_values(space: Space, value: Any) -> list[Any]:
    """Return the leaves of `value`, which is nested as `space` is, in the order of `leaves`."""
    if isinstance(space, Dict):
        return [leaf for key, sub in space.spaces.items() for leaf in leaf_values(sub, value[key])]
    if isinstance(space, Tuple):
        return [leaf for index, sub in enumerate(space.spaces) for leaf in leaf_values(sub, value[index])]
    return [value]


def box_bounds(leaf: Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lowest and highest value of each element: float64 of the leaf's shape, infinite where unbounded."""
    return _row(leaf, leaf.flat_low, -np.inf), _row(leaf, leaf.flat_high, np.inf)


def _row(leaf: Box, bound: Any, absent: float) -> NDArray[np.float64]:
    if not isinstance(bound, tuple):
        return np.full(leaf.shape, absent if bound is None else bound, np.float64)
    return np.array([absent if b is None else b for b in bound], np.float64).reshape(leaf.shape)


def exact_bound(bound: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `bound` in the space's dtype. Of integers the dtype's own bound stands for infinity.

    So rows are compared with it without a conversion, which is slow and rounds large integers.
    """
    if dtype.kind not in "iu":
        return bound.astype(dtype)  # it was made from this dtype, and comes back exactly
    span = np.iinfo(dtype)
    exact: NDArray[Any] = np.full(bound.shape, span.max, dtype)
    np.copyto(exact, span.min, where=bound <= span.min)
    inner = (bound > span.min) & (bound < span.max)
    exact[inner] = bound[inner].astype(dtype)
    return exact


def nest(space: Space, columns: Mapping[str, NDArray[Any]], root: str) -> Any:
    """Nest the arrays below `root` as `space` is nested: in dicts and tuples."""
    if isinstance(space, Dict):
        return {key: nest(sub, columns, f"{root}/{key}") for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(nest(sub, columns, f"{root}/{index}") for index, sub in enumerate(space.spaces))
    return columns[root]


def column_dtype(leaf: Leaf) -> np.dtype[Any]:
    """Return the dtype of the leaf's column."""
    return np.dtype(leaf.dtype)


def spaces_from_json(value: Any) -> Spaces:
    """Parse the pair of spaces that a peer sent, whose header bounds their depth. Raises `DecodeError`."""
    try:
        return Spaces.model_validate(value)
    except ValidationError as error:
        raise DecodeError("bad_space", f"not a pair of spaces: {error.errors()[0]['msg']:.200}") from error
