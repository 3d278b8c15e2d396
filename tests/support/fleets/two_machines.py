"""Two network namespaces joined by a cable: two machines, as far as sockets can tell. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Self


class NoNamespacesError(Exception):
    """None can be made here; the message says why."""


class TwoMachines:
    """Namespaces `here` and `there`, at the addresses `HERE` and `THERE` of a network that only they know.

    Entering it raises `NoNamespacesError` where this machine, or this user, cannot have them.
    """

    HERE, THERE = "10.213.77.1", "10.213.77.2"

    def __init__(self) -> None:
        self.here, self.there = (f"hr-{os.getpid()}-{end}" for end in ("a", "b"))
        self._cable = [f"hr{os.getpid() % 10**8}{end}" for end in ("a", "b")]

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NoNamespacesError("namespaces need root and iproute2")
        try:
            for name in (self.here, self.there):
                run_ip("netns", "add", name)
            run_ip("link", "add", self._cable[0], "type", "veth", "peer", "name", self._cable[1])
            for name, end, address in zip((self.here, self.there), self._cable, (self.HERE, self.THERE), strict=True):
                run_ip("link", "set", end, "netns", name)
                run_ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                for device in (end, "lo"):
                    run_ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def command(self, machine: str, *arguments: str) -> list[str]:
        """argv that runs `arguments` on one of the two."""
        return ["ip", "netns", "exec", machine, *arguments]

    def _remove(self) -> None:
        """Namespaces take their end of the cable along; whatever was not made is not there."""
        for name in (self.here, self.there):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._cable[0]], capture_output=True, check=False)


def run_ip(*arguments: str) -> None:
    """Run `ip`. Raises `NoNamespacesError` with what it said."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespacesError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
