"""Environments of the peers of `make compare`, and the programs that run in them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
ROOT = Path(__file__).parents[2]
INSTALL_S, SAY_S = 1800.0, 10.0


@dataclass(frozen=True, slots=True)
class Peer:
    """One library: what is installed for it, and its script for each measure."""

    name: str
    packages: tuple[str, ...]
    scripts: dict[str, str]


class FailedError(Exception):
    """A peer could not be installed or run. The text is the reason."""


def read_peers(path: Path = PEERS / "peers.toml") -> dict[str, Peer]:
    """Return all peers by name."""
    told = tomllib.loads(path.read_text())
    return {
        name: Peer(name, tuple(of["packages"]), {m: script for m, script in of.items() if m != "packages"})
        for name, of in told.items()
    }


def install(peer: Peer, folder: Path) -> Path:
    """Return the interpreter of the peer's environment, which is made if its packages have changed.

    Raises `FailedError`.
    """
    home = folder / peer.name
    python, ready = home / "bin" / "python", home / ".installed"
    wanted = hashlib.sha256(" ".join(peer.packages).encode()).hexdigest()
    if ready.exists() and ready.read_text() == wanted:
        return python
    venv.create(home, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*command, "-c", str(ROOT / "constraints.txt"), *peer.packages], f"installing {peer.name}", INSTALL_S)
    ready.write_text(wanted)
    return python


def run(command: list[str], doing: str, limit_s: float, environment: dict[str, str] | None = None) -> str:
    """Return what a command printed; say every 10 s that it runs. Raises `FailedError`."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {})
    ) as process:
        began = time.monotonic()
        while True:
            try:
                printed, errors = process.communicate(timeout=SAY_S)
                break
            except subprocess.TimeoutExpired:
                elapsed = time.monotonic() - began
                say(f"{doing}: {elapsed:.0f} s ...")
                if elapsed > limit_s:
                    process.kill()
                    process.communicate()
                    raise FailedError(f"{doing} was not done after {limit_s:.0f} s") from None
    if process.returncode:
        lines = [line for line in errors.strip().splitlines() if line.strip()]
        raise FailedError(f"{doing} ended with exit code {process.returncode}: {' | '.join(lines[-2:])[:400]}")
    return printed


def say(line: str) -> None:
    """Show progress."""
    print(line, file=sys.stderr, flush=True)


def versions(python: Path) -> dict[str, str]:
    """Return the version of each package of an environment, by name."""
    listed = run(
        [str(python), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"], "pip list", INSTALL_S
    )
    return {package["name"]: package["version"] for package in json.loads(listed)}
