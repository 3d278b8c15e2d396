"""The connections between the ranks of one consumer group: rank 0's port, and the others' way to it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import zmq

from headrace.learner_stub.link import connection
from headrace.learner_stub.link.broker_link import BrokerLink, await_message
from headrace.schemas.basics.bounds import MOST_RANKS, TRAIN
from headrace.schemas.basics.printable import brief
from headrace.schemas.credentials.keys import ClientKeys
from headrace.schemas.errors import ConfigError, DecodeError, HeadraceError, refusal
from headrace.schemas.frames.wire import Buffer, MessageKind, decode_header
from headrace.schemas.messages import Commit, LearnerWelcome, Message, RankHello, Ranks, Reject, read, read_hello
from headrace.schemas.peers import sockets
from headrace.schemas.peers.advertised import host_to_advertise, in_url, is_own_address
from headrace.schemas.peers.fleet_address import AddressSource
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.ports import bind_to_port

_ASK_S = 1.0
_ANSWER_S = 0.2
_SILENCE_S = 3.0
_MOST_BYTES = 8 << 20
"""The largest message that rank 0 takes: a HELLO with the positions of all sources."""


def chosen_rank(rank: int | str, world_size: int) -> tuple[int, int]:
    """Return (rank, world_size) as a user gave them.

    "env" takes them from the environment's RANK and WORLD_SIZE, as `torchrun` sets them: (0, 1) without these. Raises
    `ConfigError` for what is no rank of that many.
    """
    if rank == "env":
        try:
            rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        except ValueError as error:
            raise ConfigError(f"the environment's RANK and WORLD_SIZE are no numbers: {error}", key="rank") from error
    if (
        not (isinstance(rank, int) and isinstance(world_size, int))
        or not 0 < world_size <= MOST_RANKS
        or not 0 <= rank < world_size
    ):
        problem = f"rank = {brief(rank)} of world_size = {brief(world_size)}"
        raise ConfigError(f"{problem} is none of 0 to world_size - 1; {MOST_RANKS} ranks at most", key="rank")
    return rank, world_size


class RankPort:
    """Rank 0's ROUTER, at loopback where the brokers are on this machine and nobody has keys; else at all addresses.

    With keys the other ranks show the same learner's key. `own` is what rank 0 tells the broker of itself.
    """

    def __init__(self, world_size: int, endpoints: Sequence[str], keys: ClientKeys | None) -> None:
        is_local = keys is None and all(is_own_address(endpoint) for endpoint in endpoints if endpoint)
        bound = "127.0.0.1" if is_local else "0.0.0.0"
        self._own = sockets.OwnSockets(zmq.Context(), "rank 0's port for the other ranks", 0.5)
        options = sockets.ROUTER | {"HEARTBEAT_IVL": sockets.COMMON["HEARTBEAT_IVL"], "MAXMSGSIZE": _MOST_BYTES}
        curve = {"CURVE_SERVER": 1, "CURVE_SECRETKEY": keys.secret} if keys is not None else {}
        self._socket: zmq.Socket[bytes] = self._own.open(zmq.ROUTER, {**options, **curve})
        bind_to_port(self._socket.bind, bound, 0, "rank")
        port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
        host = host_to_advertise(bound, "")
        self.own = Ranks(rank=0, world_size=world_size, host=host, port=port, secret=os.urandom(16).hex())

    @property
    def usable(self) -> bool:
        """Return whether the port is not closed, and of this process."""
        return self._own.usable

    def messages(self) -> Iterator[tuple[bytes, Message]]:
        """Yield (connection, message) of what has arrived. What cannot be read is dropped: it is of no rank."""
        self._own.check()
        while sockets.has_message(self._socket):
            peer, *frames = self._socket.recv_multipart()
            try:
                kind, header = decode_header(frames)
                if kind is MessageKind.HELLO:
                    yield peer, read_hello(header)
                elif kind is MessageKind.COMMIT:
                    yield peer, read(Commit, header)
            except DecodeError:
                continue

    def send(self, peer: bytes, content: Message | list[Buffer]) -> bool:
        """Send a message to a connection. Return False if the connection has ended."""
        self._own.check()
        frames = content.frames() if isinstance(content, Message) else content
        try:
            sockets.send(self._socket, [peer, *frames])
        except zmq.ZMQError:
            return False
        return True

    def watch(self, poller: zmq.Poller) -> bool:
        """Let a poller wait for the next message. Return whether one has come already."""
        return sockets.watch(self._socket, poller)

    def close(self) -> None:
        """Close the port."""
        self._own.close()


class RankZero:
    """The address of rank 0, for another rank: its broker tells where rank 0's stream serves. An `AddressSource`.

    `fleet` names the broker's own address; `group` is the consumer group.
    """

    def __init__(
        self, own: Ranks, endpoint: str, fleet: AddressSource | None, keys: ClientKeys | None, group: str = TRAIN
    ) -> None:
        self._own = own
        self._endpoint = endpoint
        self.has_joined = False
        """True once rank 0 has welcomed this rank."""
        connection.note_rank(endpoint, own.rank)
        self.keys = replace(keys, broker=keys.public) if keys is not None else None
        """The keys that a rank shows to rank 0, which has the same learner's key."""
        self._group = group
        self._fleet = fleet
        place = FleetPlace(endpoint, "learner", fleet, says_waiting=False)
        self._link = BrokerLink(place, keys, os.urandom(8).hex(), 0)
        self._hello = RankHello(group=group)
        self._ask_at = 0.0
        self._found: Ranks | None = None
        self._heard_at = -math.inf

    def told(self) -> Ranks | None:
        """Return what this rank tells rank 0; None before it was found.

        The secret stays that of the rank 0 that this rank has joined: a later one has other batches.
        """
        return self._own if self._own.secret else None

    @property
    def problem(self) -> str:
        """Return a text on why there is no address."""
        if math.isinf(self._heard_at):
            return f"the broker at {self._link.name}, which knows where rank 0 is, does not answer"
        return f"rank 0 of consumer group {self._group!r} has no stream from the broker at {self._link.name} yet"

    def find(self, role: str) -> str:
        """Return the address of rank 0 now; "" while there is none. Raises `RefusedError` where the broker refuses."""
        if connection.now() >= self._ask_at and self._link.send(self._hello.frames()):
            self._ask_at = connection.now() + _ASK_S
            await_message([self._link], _ANSWER_S)
        kinds: dict[MessageKind, type[Message]] = {MessageKind.WELCOME: LearnerWelcome, MessageKind.REJECT: Reject}
        for message in self._link.messages(kinds):
            if isinstance(message, Reject) and message.fatal:
                raise refusal(message.code, message.detail)
            if isinstance(message, LearnerWelcome):
                self._heard_at, self._found = connection.now(), message.ranks
        self._link.follow(connection.now() - self._heard_at < _SILENCE_S, connection.now())
        found = self._found
        if found is None or not found.port:
            return ""
        if found.world_size != self._own.world_size:
            own = f"rank {self._own.rank} has world_size {self._own.world_size}"
            raise refusal("world_size", f"{own}, and rank 0 has {found.world_size}; give all ranks the same")
        if not self.has_joined:
            self._own = self._own.model_copy(update={"secret": found.secret})
        return f"tcp://{in_url(found.host)}:{found.port}"

    def stopped(self) -> HeadraceError | None:
        """Return an error that says so, if the fleet has stopped."""
        return self._fleet.stopped() if self._fleet is not None else None

    @property
    def at_goal(self) -> bool:
        """Return whether a fleet that has stopped is done."""
        return self._fleet is not None and self._fleet.at_goal

    def close(self) -> None:
        """Close the connection to the broker."""
        connection.note_rank(self._endpoint, 0)
        self._link.close(0.0)
