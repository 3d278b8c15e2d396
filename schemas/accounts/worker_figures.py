"""Figures and ports that a worker sends in heartbeats: its time by part, its clients, and where peers reach it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, Strict

from headrace.schemas.basics.addresses import HOST, PORT, SOCKET
from headrace.schemas.basics.bounds import ListOf, Natural, Seconds
from headrace.schemas.basics.headrace_version import HeadraceVersion

TimePart = Literal["env", "inference", "connectors", "serialise", "wait", "other"]
"""A part of a worker's time.

| part | the worker |
|---|---|
| env | builds, resets and steps envs, or waits for their answers |
| inference | chooses actions |
| connectors | runs `env_to_module` and `module_to_env` |
| serialise | cuts, encodes and ships chunks |
| wait | waits for the learner, the broker, an env host, or a client, whose requests it handles meanwhile |
| other | does anything else: bookkeeping, callbacks, loading weights |
"""
TIME_PARTS: tuple[TimePart, ...] = get_args(TimePart)

TimeByPart = Annotated[dict[TimePart, Seconds], Field(max_length=len(TIME_PARTS))]
"""Seconds since a worker's life began."""

BlockedBy = Literal["window", "round", "group"]
"""The waits of a worker: for room in its window, for the next round of synchronous sampling, or for other consumer
groups than the learner's, which alone keep its window full.
"""
BLOCKED_BY: tuple[BlockedBy, ...] = get_args(BlockedBy)

WaitByReason = Annotated[dict[BlockedBy, Seconds], Field(max_length=len(BLOCKED_BY))]

_Hosts = Annotated[int, Field(ge=0, le=1 << 17)]
EnvHostCounts = Annotated[tuple[_Hosts, _Hosts], Strict(False)]

MOST_VERSIONS = 8

EnvHostVersions = Annotated[ListOf[HeadraceVersion], Field(max_length=MOST_VERSIONS)]
"""The versions of Headrace that connected env hosts run, each once; "" stands for those that do not tell it."""

PortKind = Literal["envs", "clients", "http"]
"""The peers that a port of a worker serves: env hosts, clients by ZeroMQ, or clients by HTTP."""
PORT_KINDS: tuple[PortKind, ...] = get_args(PortKind)

PORT_PATTERN = rf"^((tcp|http)://{HOST}:{PORT}|{SOCKET})$"
PortAddress = Annotated[str, Field(max_length=200, pattern=PORT_PATTERN)]
_ZmqAddress = Annotated[str, Field(max_length=200, pattern=rf"^(tcp://{HOST}:{PORT}|{SOCKET})?$")]
_HttpAddress = Annotated[str, Field(max_length=200, pattern=rf"^(http://{HOST}:{PORT})?$")]


class Ports(BaseModel):
    """Addresses at which peers reach a worker; "" for peers that it does not serve."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    envs: _ZmqAddress = ""
    clients: _ZmqAddress = ""
    http: _HttpAddress = ""

    def by_kind(self) -> dict[PortKind, str]:
        """Return the addresses that there are."""
        return {kind: address for kind in PORT_KINDS if (address := getattr(self, kind))}


def fits_kind(kind: str, address: str) -> bool:
    """Return whether peers of this kind can connect to the address."""
    return address.startswith("http:") is (kind == "http")


MOST_CLIENTS = 1 << 20


class ServingFigures(BaseModel):
    """Figures of a policy server. Latencies are from the arrival of a step to its answer, over recent steps."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    clients: Annotated[int, Field(ge=0, le=MOST_CLIENTS)] = 0
    """Open sessions."""
    requests: Natural = 0
    """Requests of this life, heartbeats of clients left out."""
    latency_p50_s: Seconds = 0.0
    latency_p95_s: Seconds = 0.0
