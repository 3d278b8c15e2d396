"""Messages between a worker and the hosts of its envs, at a port of the worker's own.

                 env host                    worker
    HELLO        ─────────────────────────────▶      a life begins: how many envs, of which spaces
    WELCOME      ◀─────────────────────────────      what the envs' creators are told
    ENV_ORDERS   ◀─────────────────────────────      build, reset or step some of the envs
    ENV_ANSWERS  ─────────────────────────────▶      the results
    HEARTBEAT    ◀────────────────────────────▶      alive; the host's says which orders it works on
    BYE          ─────────────────────────────▶      leaving: the envs are gone
    REJECT       ◀─────────────────────────────      do not connect again
    FENCED       ◀─────────────────────────────      this life is over, or unknown: begin another

Each place of a host holds one env and has at most one order under way. Orders of a place are numbered from 1 within a
life of its host. Orders are idempotent: a host that gets one again answers it again and does not repeat it. So any
message may be lost: the worker sends an order again when it is neither answered nor under way.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, Strict

from headrace.schemas.basics.bounds import MOST_SILENCE_S, ListOf, Natural, Pid, Positive
from headrace.schemas.basics.headrace_version import HeadraceVersion
from headrace.schemas.basics.process_usage import Usage
from headrace.schemas.frames.wire import MessageKind
from headrace.schemas.messages import Message

MOST_ENVS = 65_536
NO_SEED, WITHOUT_SEED = -1, -2

Life = Annotated[str, Field(min_length=1, max_length=64)]
Place = Annotated[int, Field(ge=0, lt=MOST_ENVS)]
Numbered = Annotated[tuple[Place, Natural], Strict(False)]
"""(place, number of its order)."""
Order = Annotated[
    tuple[Place, Natural, Literal[1, 2, 3, 4], Annotated[int, Field(ge=WITHOUT_SEED, lt=1 << 63)], Place],
    Strict(False),
]
"""(place, number, command, seed, index of the env in the worker). Commands are BUILD, REBUILD, RESET and STEP, 1 to 4,
as for processes of envs. A STEP's seed, unless NO_SEED, is for the reset that follows if the step ends the episode.
WITHOUT_SEED asks for a reset without a seed.
"""
Info = dict[str, Any] | None
ValueAndBound = Annotated[tuple[FiniteFloat, FiniteFloat], Strict(False)]


class EnvHostHello(Message):
    """Begins a life of an env host, with fresh envs."""

    KIND = MessageKind.HELLO
    role: Literal["env-host"] = "env-host"
    life: Life
    """Random, one for each life. It distinguishes messages of this life from those of an earlier one."""
    num_envs: Annotated[int, Field(ge=1, le=MOST_ENVS)]
    spaces: dict[str, Any]
    """Spaces of each of its envs, as `schemas/chunks/spaces.py` writes them."""
    env: str = ""
    host: str = ""
    pid: Pid = 0
    headrace_version: HeadraceVersion = ""


class EnvHostWelcome(Message):
    """The worker's answer to HELLO. A host that then gets no orders is a spare one."""

    KIND = MessageKind.WELCOME
    LEFT_OUT = frozenset(("without_infos",))
    worker_index: Natural
    num_workers: Natural
    num_envs: Positive
    """Number of envs of the worker, wherever they are."""
    lease_s: float = Field(gt=0, le=MOST_SILENCE_S)
    heartbeat_interval_s: float = Field(ge=0.001, le=60)
    without_infos: bool = False
    """True: the worker wants no infos but masks of actions. Workers of wire version 1.0 do not tell it."""


class EnvHeartbeat(Message):
    """Says that the sender is alive. From a host, `under_way` lists all orders that it has not answered."""

    KIND = MessageKind.HEARTBEAT
    LEFT_OUT = frozenset(("usage",))
    life: Life
    under_way: ListOf[Numbered] = Field(default=[])
    usage: Usage | None = None
    """The use of the host and the processes of its envs together."""


class EnvOrders(Message):
    """Header of the orders. Arrays "actions..." have one row for each STEP, in order."""

    KIND = MessageKind.ENV_ORDERS
    LEFT_OUT = frozenset(("tasks",))
    life: Life
    orders: ListOf[Order]
    tasks: ListOf[Annotated[tuple[Place, dict[str, Any]], Strict(False)]] = Field(default=[])
    """The values of the tasks for the resets that these places are ordered, now or after the step."""


class EnvAnswers(Message):
    """Header of the answers.

    Arrays: "rewards" float64 and "obs..." have one row for each of `stepped`; "first..." has one for each of `began`,
    in order. "obs..." is the observation after the step, "first..." the first one of the next episode.
    """

    KIND = MessageKind.ENV_ANSWERS
    LEFT_OUT = frozenset(("outside",))
    life: Life
    answers: ListOf[Numbered]
    """The orders that this message answers."""
    stepped: ListOf[Place] = Field(default=[])
    ended: ListOf[Annotated[tuple[Place, Literal[1, 2]], Strict(False)]] = Field(default=[])
    """Places that stepped and ended their episode: 1 terminated, 2 truncated."""
    also_truncated: ListOf[Place] = Field(default=[])
    """Places in `ended` as terminated that are truncated too. Hosts of wire version 1.0 do not tell it."""
    began: ListOf[Annotated[tuple[Place, Info], Strict(False)]] = Field(default=[])
    built: ListOf[Place] = Field(default=[])
    infos: ListOf[Annotated[tuple[Place, dict[str, Any]], Strict(False)]] = Field(default=[])
    failures: ListOf[Annotated[tuple[Place, str, bool, dict[str, Any]], Strict(False)]] = Field(default=[])
    """(place, call that failed, whether that call returned, the error): the place has no env now."""
    outside: ListOf[Annotated[tuple[Natural, dict[str, ValueAndBound]], Strict(False)]] = Field(default=[])
    """(number of observations outside their Box, part -> (value farthest outside, its bound)), since the last answer.
    Hosts of wire version 1.0 do not tell it.
    """


class EnvHostBye(Message):
    """Says that the host leaves, and its envs with it."""

    KIND = MessageKind.BYE
    life: Life
    reason: str = "shutdown"
