"""`headrace serve` in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym

from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.envs.spaces import spaces_of
from support.waiting import wait_until


def cart_spaces(env_id: str = "CartPole-v1") -> Spaces:
    env = gym.make(env_id)
    env.close()
    return spaces_of(env)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "headrace.deploy", "serve", "--checkpoint", str(folder), *options]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=folder)
    with process:
        try:
            yield process
        finally:
            process.kill()


def served_at(folder: Path) -> str:
    """Return the Unix socket of the process that serves from `folder`, once it has said it."""
    log = folder / "log"
    return wait_until(lambda: re.search(r"ipc:///\S+", log.read_text()), "the address of the server")[0]
