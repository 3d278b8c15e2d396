"""Settings of the policy server inside each worker: where clients connect, and what they may take."""

from __future__ import annotations

from pydantic import Field, model_validator

from headrace.schemas.basics.bounds import HIGHEST_PORT, MOST_SILENCE_S
from headrace.schemas.settings.config_section import ConfigSection


def check_last_port(key: str, first: int, workers: int) -> None:
    """Raise ValueError unless each of `workers` workers, whose slot is added to `first`, has a port. `key` names it."""
    if first + workers - 1 > HIGHEST_PORT:
        raise ValueError(
            f"{key} = {first} leaves no port for each of fleet.workers = {workers}: the slot is added to it, up to "
            f"{HIGHEST_PORT}; lower it"
        )


class ServingSection(ConfigSection):
    """Settings of serving: clients drive the episodes.

    sampling.env is not stepped: its spaces are those of observations and actions that clients exchange.
    """

    enabled: bool = False
    """clients elsewhere drive the episodes, at most sampling.num_envs at once in each worker"""
    host: str = ""
    """address to bind for TCP, which needs [keys] or broker.allow_insecure; empty: a Unix socket, and HTTP on
    127.0.0.1"""
    port: int = Field(default=0, ge=0, le=HIGHEST_PORT)
    """port for ZeroMQ, to which the worker's slot is added; 0 takes a free one"""
    http_port: int | None = Field(default=None, ge=0, le=HIGHEST_PORT)
    """port for HTTP, to which the worker's slot is added; 0 takes a free one; absent: no HTTP; clients show
    http.token of keys.dir, if the folder has it"""
    lease_s: float = Field(default=30.0, ge=0.2, le=MOST_SILENCE_S)
    """silence after which a client's episodes are aborted"""
    max_message_bytes: int = Field(default=16 << 20, ge=1 << 12, le=1 << 28)
    """largest message of a client"""

    client_inference: bool = False
    """clients may pull the weights, act by themselves and ship chunks"""

    @model_validator(mode="after")
    def _check(self) -> ServingSection:
        if self.port and not self.host:
            raise ValueError(
                f"port = {self.port} is for TCP, and host is empty, which means a Unix socket; give host and [keys], "
                "or leave port out"
            )
        if self.port and self.port == self.http_port:
            raise ValueError(f"port = {self.port} and http_port = {self.http_port} must differ")
        return self

    @property
    def http_host(self) -> str:
        """Return the address to bind for HTTP."""
        return self.host or "127.0.0.1"

    def check_slots(self, workers: int) -> None:
        """Raise ValueError unless each of `workers` workers, whose slot is added, gets ports that no other has."""
        port, http_port = self.port, self.http_port or 0
        if not self.enabled or workers < 1:
            return
        for name, first in (("port", port), ("http_port", http_port)):
            check_last_port(f"serving.{name}", first, workers)
        if port and http_port and abs(port - http_port) < workers:
            raise ValueError(
                f"serving.port = {port} and serving.http_port = {http_port} meet, since each of fleet.workers = "
                f"{workers} adds its slot; keep them {workers} or more apart"
            )
