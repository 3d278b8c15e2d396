"""The schedule of a trial: which fault happens when. It follows from the seed alone, before anything starts."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace.schemas.errors import ConfigError

FIRST_S = 3.0
"""Seconds between the first steps at the learner and the first event."""
CALM_S = 8.0
"""Seconds at the end of the schedule in which no event begins."""
_GAPS_S = (2.0, 9.0)
_BURST_GAP_S = 0.3
_MOST_EVENTS = 100_000

SLOT_TARGETS = "worker-"
ELSEWHERE = "worker-elsewhere"
"""The worker that the trial starts itself. It reaches the broker through a relay."""
SUPERVISOR = "supervisor"
KILLABLE = ("broker", "learner", "redis", SUPERVISOR, ELSEWHERE)
LINKS = ("learner", ELSEWHERE)


class Kind(StrEnum):
    """The kinds of fault."""

    KILL = "kill"
    STOP = "stop"
    CUT = "cut"
    STALL = "stall"
    SLOW = "slow"
    FLUSH = "flush"
    REPLACE = "replace"
    FULL = "full"
    READ_ONLY = "read-only"
    ENV = "env"


ENV_FAULTS = ("exception", "bad-data", "hang", "segfault")


class Event(BaseModel):
    """One fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    at_s: Annotated[float, Field(ge=0)]
    """Seconds after the first step reached the learner."""
    kind: Kind
    targets: tuple[str, ...] = ()
    """Processes or links, all at one instant; empty for faults that have no target."""
    seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the fault lasts; 0 for one that is over at once."""
    detail: str = ""
    """The kind of env fault."""

    @model_validator(mode="after")
    def _check_names(self) -> Event:
        known: tuple[str, ...] = ENV_FAULTS if self.kind is Kind.ENV else ("",)
        if self.detail not in known:
            raise ValueError(f"detail {self.detail!r} of {self.kind.value} is none of {', '.join(known)}")
        known = LINKS if self.kind in (Kind.CUT, Kind.STALL) else (*KILLABLE, *_workers_in(self.targets))
        if unknown := [target for target in self.targets if target not in known]:
            raise ValueError(f"target {unknown[0]!r} of {self.kind.value} is none of {', '.join(known)}")
        if bool(self.targets) != (self.kind in (Kind.KILL, Kind.STOP, Kind.CUT, Kind.STALL)):
            raise ValueError(f"{self.kind.value} has {len(self.targets)} targets")
        return self

    @property
    def name(self) -> str:
        """Return the kind of the fault, and the detail that tells it from other faults of that kind."""
        return " ".join((self.kind.value, *filter(None, (" + ".join(self.targets), self.detail))))

    def in_words(self) -> str:
        """Return the event as one line."""
        lasts = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.at_s:7.1f} s  {self.name}{lasts}"


class Plan(BaseModel):
    """A schedule, and the fleet that it was made for."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    seed: int
    minutes: Annotated[float, Field(gt=0, le=100_000)]
    workers: Annotated[int, Field(ge=1, le=10_000)]
    lease_s: Annotated[float, Field(gt=0)]
    events: Annotated[tuple[Event, ...], Field(max_length=_MOST_EVENTS)] = ()

    @property
    def seconds(self) -> float:
        """Return how long the schedule takes."""
        return 60.0 * self.minutes

    def slots_hit_by(self, event: Event) -> set[int]:
        """Return the slots of the fleet whose workers an event kills or stops; the supervisor's end hits all slots."""
        if event.kind is Kind.KILL and SUPERVISOR in event.targets:
            return set(range(self.workers))
        return {int(target.removeprefix(SLOT_TARGETS)) for target in _workers_in(event.targets)}

    def as_json(self) -> bytes:
        """Return the plan as `read_plan` reads it."""
        return orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_INDENT_2)


def make_plan(seed: int, minutes: float, workers: int, lease_s: float) -> Plan:
    """Return the schedule of a seed. The same arguments give the same schedule."""
    rng = random.Random(f"chaos {seed} {workers}")
    events: list[Event] = []
    now, last = FIRST_S, 60.0 * minutes - CALM_S
    bag: list[str] = []
    while now <= last:
        if not bag:
            bag = rng.sample(_BAG, len(_BAG))
        for event in _draw(bag.pop(), rng, workers, lease_s):
            if now + event.at_s <= last:
                events.append(event.model_copy(update={"at_s": round(now + event.at_s, 2)}))
        now += rng.uniform(*_GAPS_S)
    return Plan(seed=seed, minutes=minutes, workers=workers, lease_s=lease_s, events=tuple(events))


def read_plan(path: Path) -> Plan:
    """Return the plan in a file, JSON or TOML. Raises `ConfigError`."""
    try:
        content = path.read_bytes()
        found = tomllib.loads(content.decode()) if path.suffix == ".toml" else orjson.loads(content)
        plan = Plan.model_validate(found)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})", key="--plan") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is no plan: {where}: {first['msg']}", key="--plan") from error
    except ValueError as error:
        raise ConfigError(f"{path} is neither JSON nor TOML ({error})", key="--plan") from error
    return plan.model_copy(update={"events": tuple(sorted(plan.events, key=lambda event: event.at_s))})


_BAG = (
    *("kill one",) * 6,
    *("kill two",) * 3,
    "kill three",
    "burst",
    *("stop short",) * 2,
    *("stop long",) * 2,
    "cut",
    "stall",
    "slow",
    "flush",
    "replace",
    "full",
    "read-only",
    *("env",) * 3,
)
"""Kinds of events by their shares. All of them happen before any of them happens more often than here."""


def _draw(kind: str, rng: random.Random, workers: int, lease_s: float) -> Iterator[Event]:
    """Yield the events of one draw, at seconds from now."""
    everything = (*KILLABLE, *(f"{SLOT_TARGETS}{slot}" for slot in range(workers)))
    seconds = round(rng.uniform(1.0, 4.0), 2)
    match kind.split():
        case ["kill", number]:
            count = min(("one", "two", "three").index(number) + 1, len(everything))
            yield Event(at_s=0, kind=Kind.KILL, targets=tuple(sorted(rng.sample(everything, count))))
        case ["burst"]:
            for step in range(rng.randint(3, 5)):
                yield Event(at_s=step * _BURST_GAP_S, kind=Kind.KILL, targets=(rng.choice(everything),))
        case ["stop", length]:
            # A stopped supervisor watches nothing, so a longer stop tests nothing more.
            target = rng.choice(everything if length == "short" else tuple(sorted({*everything} - {SUPERVISOR})))
            lasts = round((0.4 if length == "short" else 1.8) * lease_s, 2)
            yield Event(at_s=0, kind=Kind.STOP, targets=(target,), seconds=lasts)
        case ["cut" | "stall" as link]:
            yield Event(at_s=0, kind=Kind(link), targets=(rng.choice(LINKS),), seconds=seconds)
        case ["env"]:
            yield Event(at_s=0, kind=Kind.ENV, detail=rng.choice(ENV_FAULTS))
        case ["flush" | "replace" as loss]:
            yield Event(at_s=0, kind=Kind(loss))
        case _:
            yield Event(at_s=0, kind=Kind(kind), seconds=seconds)


def _workers_in(targets: tuple[str, ...]) -> list[str]:
    return [target for target in targets if target.startswith(SLOT_TARGETS) and target[len(SLOT_TARGETS) :].isdecimal()]
