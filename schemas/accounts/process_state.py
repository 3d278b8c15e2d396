"""The state of one process as its supervisor sees it: the values of the Redis hash `processes`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from headrace.schemas.basics.bounds import IncarnationOrNone, Pid, Slot

MOST_WORDS = 1000
_Text = Annotated[str, Field(max_length=256)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProcessState(BaseModel):
    """One process of a fleet at one moment.

    - state: starting, running, draining, stopped (of the supervisor too); restarting, fenced, failed.
    - doing: loading (has not joined yet), building (its envs), rebuilding (an env), or which call of an
      env, policy or callback lasts; "" for anything else.
    - silent_s: seconds since its last sign of life; 0 for a role that gives none.
    - pid: 0 between two lives. Then started_unix_s is 0 too.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    name: _Text
    role: _Text
    slot: Slot | None = None
    incarnation: IncarnationOrNone = 0
    pid: Pid = 0
    host: _Text = ""
    state: _Text = "running"
    started_unix_s: _Number = 0.0
    restarts: Annotated[int, Field(ge=0)] = 0
    last_words: Annotated[str, Field(max_length=MOST_WORDS)] = ""
    """Text on how its last life ended."""
    recent_deaths: Annotated[int, Field(ge=0)] = 0
    """Deaths within 60 s of running, as of the last one."""
    cpu_s: _Number = 0.0
    rss_bytes: Annotated[int, Field(ge=0)] = 0
    is_stopped: bool = False
    """True if a signal has stopped it."""
    silent_s: _Number = 0.0
    doing: _Text = ""
    disk_free_bytes: Annotated[int, Field(ge=0)] | None = None
    """Bytes that the supervisor may still write to the disk of the run directory; None if it does not tell."""
    unix_s: _Number = 0.0
    """Time of these values, by the supervisor's clock."""
