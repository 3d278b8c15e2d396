"""The base class of control messages, and the parts that several of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.basics.bounds import MOST_GROUPS, GroupName, IncarnationOrNone, ListOf, Natural, Slot, Version
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, Buffer, MessageKind, encode

M = TypeVar("M", bound=BaseModel)

MOST_TENSORS = 1024
MOST_NAME = 200
_MOST_NAMES = 1 << 16
"""Most characters of all names of tensors in one message together."""
MOST_DETAIL = 1000
MOST_SHORT_DETAIL = 200


Receiver = Literal["broker", "worker", "stream", "publisher", "teacher", "supervisor"]
"""A process of the fleet, or the part of a learner, that takes control messages."""


class Message(BaseModel):
    """A control message; `KIND` names it on the wire."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    KIND: ClassVar[MessageKind]
    TO: ClassVar[tuple[Receiver, ...]] = ()
    """Its receivers. Empty for a HELLO, which is read by its role, for weights, and for messages outside the fleet."""
    LEFT_OUT: ClassVar[frozenset[str]] = frozenset()
    """Fields that are not on the wire while they are empty."""

    def frames(self) -> list[Buffer]:
        """Return the message as ZeroMQ frames."""
        return encode(self.KIND, self.to_wire())

    def to_wire(self) -> dict[str, Any]:
        """Return the fields as they go onto the wire."""
        return self.model_dump(exclude={name for name in self.LEFT_OUT if not getattr(self, name)} or None)


class SourcePosition(BaseModel):
    """A learner's progress with one incarnation: it has trained on all batches up to `seq` that it was given."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    slot: Slot
    incarnation: IncarnationOrNone
    settled: Settled
    ended: bool = False
    """True once its user has taken the markers of the episodes that were open at the end of this incarnation."""


SettledByGroup = Annotated[dict[GroupName, Settled], Field(max_length=MOST_GROUPS)]
"""Settled batches of one incarnation, by consumer group. Has each group for which workers wait, but not `TRAIN`."""


class WeightsRefusal(BaseModel):
    """A version of the weights that a worker could not load, and why."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    version: Version
    slot: Slot = 0
    detail: Annotated[str, Field(max_length=MOST_DETAIL)]


ModuleShapes = Annotated[
    dict[
        Annotated[str, Field(max_length=MOST_NAME)],
        Annotated[
            dict[
                Annotated[str, Field(max_length=MOST_NAME)],
                Annotated[ListOf[Annotated[int, Field(ge=0, lt=1 << 48)]], Field(max_length=DEFAULT_LIMITS.dims)],
            ],
            Field(max_length=MOST_TENSORS),
        ],
    ],
    Field(max_length=MOST_TENSORS),
]
"""Shapes of the weights that workers load, by module and name. Empty: not known, or too many to tell."""


ModuleKinds = Annotated[
    dict[Annotated[str, Field(max_length=MOST_NAME)], Annotated[str, Field(max_length=MOST_TENSORS)]],
    Field(max_length=MOST_TENSORS),
]
"""Kinds of number of the weights that workers load: by module a letter for each tensor, in the order of the shapes.

f: floats, i: integers, b: bools. A module that is missing, or another letter: not known.
"""


def tellable_weights(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a HELLO says of tensors or arrays, by module and name: `weight_shapes` and `weight_kinds`."""
    shapes = tellable_shapes({id: {name: tensor.shape for name, tensor in own.items()} for id, own in modules.items()})
    kinds = {id: "".join(kind_of(modules[id][name].dtype) for name in own) for id, own in shapes.items()}
    return {"weight_shapes": shapes, "weight_kinds": kinds}


def kind_of(dtype: Any) -> str:
    """Return the letter in `ModuleKinds` of a dtype of numpy or torch."""
    name = str(dtype).removeprefix("torch.")
    return "f" if "float" in name else name[0].replace("u", "i")


def tellable_shapes(shapes: Mapping[str, Mapping[str, Sequence[int]]]) -> dict[str, dict[str, list[int]]]:
    """Return the shapes as a message carries them: all, or none if they are too many or their names too long."""
    names = [*shapes, *(name for own in shapes.values() for name in own)]
    sizes = [len(name) for name in names]
    if len(names) > MOST_TENSORS or max(sizes, default=0) > MOST_NAME or sum(sizes) > _MOST_NAMES:
        return {}
    return {module_id: {name: list(shape) for name, shape in own.items()} for module_id, own in shapes.items()}


class Reject(Message):
    """Refuses this peer or this message; `fatal` says whether the peer must stop."""

    KIND = MessageKind.REJECT
    TO = ("worker", "stream", "publisher", "teacher", "supervisor")
    code: str
    detail: str
    fatal: bool = True
    seq: Natural = 0
    """The refused batch, if one was."""


class Fenced(Message):
    """Tells a peer that a newer one has taken its place.

    For a worker `accepted` is final: no later batch of it counts.
    """

    KIND = MessageKind.FENCED
    TO = ("worker", "stream", "publisher", "teacher")
    detail: str
    accepted: Natural = 0
    settled: Settled = Settled()


def messages_to(receiver: Receiver) -> dict[MessageKind, type[Message]]:
    """Return the control messages that `receiver` takes, by kind."""
    classes = [Message]
    for cls in classes:
        classes += cls.__subclasses__()
    return {cls.KIND: cls for cls in classes if receiver in cls.TO}


def read(message: type[M], header: dict[str, Any]) -> M:
    """Parse the header as `message`. Raises `DecodeError` naming the field that is wrong."""
    try:
        return message.model_validate(header)
    except ValidationError as error:
        raise DecodeError("bad_message", f"{message.__name__}: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    first: Any = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])):.100}: {first['msg']:.200}"
