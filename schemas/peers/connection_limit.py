"""How many connections a port may have: as many as this process may open files for."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

_OWN_FILES = 256
"""Descriptors that a process needs in addition to connections."""


def connection_limit(most: int, ports: int = 1) -> int:
    """Return how many connections each of `ports` ports may have: `most`, if this process may open so many files.

    Raise the soft limit of open files for that as far as the system lets this process. Without descriptors left a
    process can neither write its state nor accept peers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most * ports + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    places = most if soft == resource.RLIM_INFINITY else min(most, max(soft - _OWN_FILES, soft // 2) // ports)
    if places < most:
        log.warning("at most %d connections at a port, not %d: this process may open only %d files", places, most, soft)
    return places
