"""What a receiver of messages accepts at most, for whoever sends them to know too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What a receiver accepts at most, checked before anything is allocated. Sizes in bytes."""

    header_bytes: int = 1 << 20
    payload_bytes: int = 256 << 20
    infos_bytes: int = 8 << 20
    frames: int = 64
    arrays: int = 4096
    dims: int = 8
    header_depth: int = 64


DEFAULT_LIMITS = WireLimits()
