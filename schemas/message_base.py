"""The base class of control messages, and the parts that several of them share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from headrace.schemas.errors import DecodeError
from headrace.schemas.ledger import Natural, Settled
from headrace.schemas.wire import Buffer, MessageKind, encode

Positive = Annotated[Natural, Field(gt=0)]
Version = Annotated[tuple[Natural, Natural], Strict(False)]
"""(learner_epoch, seq) of weights, ordered as a pair; (0, 0) means no weights yet."""

M = TypeVar("M", bound=BaseModel)


class Message(BaseModel):
    """A control message; `KIND` names it on the wire."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    KIND: ClassVar[MessageKind]

    def frames(self) -> list[Buffer]:
        """Return the message as ZeroMQ frames."""
        return encode(self.KIND, self.model_dump())


class SourcePosition(BaseModel):
    """A learner's progress with one incarnation: it has trained on all batches up to `seq` that it was given."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    slot: Natural
    incarnation: Natural
    settled: Settled


class HeldBatch(BaseModel):
    """The counts of a batch that a worker, the broker or a learner holds."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    seq: Positive
    steps: Natural
    chunks: Natural


class Reject(Message):
    """Refuses this peer or this message; `fatal` says whether the peer must stop."""

    KIND = MessageKind.REJECT
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
    detail: str
    accepted: Natural = 0
    settled: Settled = Settled()


def read(message: type[M], header: dict[str, Any]) -> M:
    """Parse the header as `message`. Raises `DecodeError` naming the field that is wrong."""
    try:
        return message.model_validate(header)
    except ValidationError as error:
        raise DecodeError("bad_message", f"{message.__name__}: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    first: Any = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])):.100}: {first['msg']:.200}"
