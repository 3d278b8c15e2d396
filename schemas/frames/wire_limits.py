"""The limits of what a receiver of messages accepts. Senders know them too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The most that a receiver accepts, checked before it allocates anything. Sizes in bytes."""

    header_bytes: int = 1 << 20
    payload_bytes: int = 256 << 20
    infos_bytes: int = 8 << 20
    frames: int = 64
    arrays: int = 4096
    dims: int = 8
    header_depth: int = 64
    names: int = 8192
    """Names of one object of the header."""


DEFAULT_LIMITS = WireLimits()
