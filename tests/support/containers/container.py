"""A container as a manifest or a compose file describes it, with its files as their engine would mount them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FLEET, VALKEY = "fleet.toml", "valkey.conf"


@dataclass(frozen=True, slots=True)
class Container:
    """What to run, as whom, with which files.

    - command: argv with the entrypoint of its image.
    - files: path in the container -> file or folder here; all are read-only.
    - folders: path -> folder here, to write to.
    - memory: path -> bytes of a file system in memory.
    - alive, ready: argv of its probes; empty without one.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    user: int
    files: Mapping[str, Path]
    folders: Mapping[str, Path]
    memory: Mapping[str, int]
    grace_s: float
    alive: Sequence[str] = ()
    ready: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Image:
    """What the Dockerfile says of a process: its entrypoint and its environment."""

    entrypoint: Sequence[str]
    environment: Mapping[str, str]
    health: Sequence[str]


def image_of(dockerfile: Path) -> Image:
    """Return what the last stage of a Dockerfile says, for the words that ours uses."""
    stage = dockerfile.read_text().rpartition("\nFROM ")[2].replace("\\\n", " ")
    pairs = re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"^ENV (.+)$", stage, re.MULTILINE)))
    entrypoint = re.search(r"^ENTRYPOINT (\[.*\])$", stage, re.MULTILINE)
    health = re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", stage, re.MULTILINE)
    assert entrypoint is not None
    assert health is not None
    return Image(json.loads(entrypoint[1]), dict(pairs), json.loads(health[1]))
