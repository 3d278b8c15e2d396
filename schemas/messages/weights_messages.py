"""Messages that carry weights from a publisher through the broker to the workers."""

from __future__ import annotations

from pydantic import Field

from headrace.schemas.basics.bounds import Bytes, ChosenName, ListOf, Version
from headrace.schemas.frames.wire import MessageKind
from headrace.schemas.messages.message_base import Message


class WeightsAck(Message):
    """Broker to publisher: the relay holds this version, or a newer one."""

    KIND = MessageKind.WEIGHTS_ACK
    TO = ("publisher",)
    version: Version
    is_held: bool = True
    """False for an announced version that the broker does not find in its machine's memory: send it whole."""


class WeightsHeader(Message):
    """Header of a WEIGHTS message. Its arrays are the tensors.

    A message without arrays is an announcement. The broker announces a large version, which workers map or pull. To
    workers of its machine it also announces a smaller one that they can map. A publisher announces one that it has
    written to the memory of its machine, for the broker to map.
    """

    KIND = MessageKind.WEIGHTS
    fleet_id: ChosenName
    version: Version
    digest: str
    """That of `weights_digest`, over names, dtypes, shapes and bytes of the tensors."""
    base: str = Field(default="", max_length=32)
    """The digest of another version: the message has the tensors that differ from it, and `digest` is of the whole.

    Readers before 1.1 refuse such a message, since its tensors do not have that digest.
    """


MAPPING_TOPIC = b"MAPS"
"""First frame of the relay's messages to subscribers that map versions from the memory of the broker's machine.
Messages to other subscribers do not have it.
"""

PIECE_BYTES = 1 << 20
"""The length of a piece. A broker encodes each piece once for all workers."""


class WeightsPull(Message):
    """Worker to broker: send the piece with the byte at `offset` of the newest version's blob.

    Older brokers send `length` bytes from there, so ask for whole pieces.
    """

    KIND = MessageKind.WEIGHTS_PULL
    TO = ("broker",)
    offset: Bytes
    length: int = Field(ge=1, le=4 << 20)
    version: Version = (0, 0)
    """The version being pulled; at offset 0 any version, and the newest comes."""


class WeightsPart(Message):
    """Header of a piece of weights; its one array `part` (uint8) holds the bytes.

    The blob is the version's WEIGHTS frames one after another; `frame_sizes` says where to cut it. When `version` is
    not the one asked for, the puller starts over with it.
    """

    KIND = MessageKind.WEIGHTS_PART
    version: Version
    offset: Bytes
    frame_sizes: ListOf[Bytes] = []
