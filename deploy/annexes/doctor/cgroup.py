"""The limits of this process's control group, by cgroup v1 and v2, and of all groups above it.

A container runtime, systemd or Slurm sets these limits. The control group files are the only place to read them: the
kernel still shows a process the whole machine's cores and memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_LARGEST_FILE = 1 << 20
_NO_LIMIT = 1 << 60
"""cgroup v1 has a number near 2**63 where there is no limit."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit, and the file or the words that say where it is set."""

    value: float
    where: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Joint limits of this process and all processes that it starts. None: only the machine's own limit holds.

    Memory is in bytes, `cpus` in cores, `tasks` in processes and threads.
    """

    memory: Limit | None = None
    cpus: Limit | None = None
    tasks: Limit | None = None


def read_limits(proc: Path = Path("/proc/self")) -> Limits:
    """Return the tightest limits of this process's groups. An unreadable file counts as no limit."""
    groups, mounts = _text(proc / "cgroup"), _text(proc / "mountinfo")
    return Limits(
        memory=_tightest(_folders(groups, mounts, "memory"), ("memory.max", "memory.limit_in_bytes"), _number),
        cpus=_tightest(_folders(groups, mounts, "cpu"), ("cpu.max", "cpu.cfs_quota_us"), _cpus),
        tasks=_tightest(_folders(groups, mounts, "pids"), ("pids.max",), _number),
    )


def _tightest(folders: Iterator[Path], names: tuple[str, ...], read: Callable[[Path], float | None]) -> Limit | None:
    """Return the lowest limit that any of the files has."""
    files = (folder / name for folder in folders for name in names)
    found = [Limit(value, str(path)) for path in files if (value := read(path)) is not None]
    return min(found, key=lambda limit: limit.value, default=None)


def _folders(groups: str, mounts: str, controller: str) -> Iterator[Path]:
    """Give the folders of our groups that may limit `controller`, each with those above it."""
    for line in mounts.splitlines():
        # id parent device ROOT MOUNTPOINT options [tags] - TYPE source options
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or kind[:1] not in (["cgroup"], ["cgroup2"]):
            continue
        # A hierarchy of v1 without this controller has none of its files.
        group = _group(groups, "" if kind[0] == "cgroup2" else controller)
        if group is not None:
            yield from _upwards(Path(fields[4]), _below(group, fields[3]))


def _group(groups: str, controller: str) -> str | None:
    """Return the path of our group in the hierarchy of a v1 `controller`, or in the v2 hierarchy for ""."""
    for line in groups.splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(",") and path.startswith("/"):
            return path
    return None


def _below(group: str, root: str) -> PurePosixPath:
    """Return the group's path below the mount. A container sees its own group at the mount, under another path."""
    try:
        return PurePosixPath(group).relative_to(root)
    except ValueError:
        return PurePosixPath()


def _upwards(mount: Path, below: PurePosixPath) -> Iterator[Path]:
    if ".." in below.parts:  # the group is in another namespace: only the mount's own group is visible
        below = PurePosixPath()
    yield from (mount / path for path in (below, *below.parents))


def _number(path: Path) -> float | None:
    with contextlib.suppress(ValueError):
        value = int(_text(path))
        return value if 0 < value < _NO_LIMIT else None
    return None


def _cpus(path: Path) -> float | None:
    """Return cores: quota over period. v2 has both in one file, v1 in two."""
    words = _text(path).split()
    if path.name == "cpu.cfs_quota_us":
        words += _text(path.with_name("cpu.cfs_period_us")).split()
    with contextlib.suppress(ValueError):
        quota, period = (int(word) for word in words)
        return quota / period if quota > 0 and period > 0 else None
    return None


def _text(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(_LARGEST_FILE)
    except OSError:
        return ""


def machine_memory() -> Limit:
    """Return the memory of the machine, in bytes."""
    return Limit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the machine")
