"""Several network namespaces on one switch: machines, as far as sockets can tell. Needs root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import orjson

from support.fleets.two_machines import NoNamespacesError, run_ip

_FILES = Path("/etc/netns")
"""Below it, the files of a namespace that stand in the place of those in /etc."""


class Machines:
    """Namespaces named as given, each with an address of a network that only they know.

    They resolve the names that `point` gives them, by a file of hosts that `ip netns exec` mounts.

    Entering it raises `NoNamespacesError` where this machine, or this user, cannot have them.
    """

    def __init__(self, *names: str) -> None:
        self._tag = f"hm{os.getpid() % 10**6}"
        self._number = {name: number for number, name in enumerate(names, 1)}
        self._names: dict[str, str] = {}

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NoNamespacesError("namespaces need root and iproute2")
        try:
            run_ip("netns", "add", self._tag)
            run_ip("-n", self._tag, "link", "add", "switch", "type", "bridge")
            run_ip("-n", self._tag, "link", "set", "switch", "up")
            for name in self._number:
                self._add(name)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def address(self, name: str) -> str:
        """Return the address of a machine."""
        return f"10.213.78.{self._number[name]}"

    def command(self, name: str, *arguments: str) -> list[str]:
        """Return argv that runs `arguments` on a machine."""
        return ["ip", "netns", "exec", self._namespace(name), *arguments]

    def point(self, name: str, machine: str) -> None:
        """Let `name` resolve to the address of `machine`, on all machines."""
        self._names[name] = self.address(machine)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._names.items())]
        for one in self._number:
            self._hosts_of(one).write_text("\n".join(lines) + "\n")  # in place, as the file itself is mounted

    def connect(self, name: str, *, connected: bool) -> None:
        """Pull the cable of a machine out of the switch, or put it back."""
        run_ip("-n", self._tag, "link", "set", self._cable(name), "up" if connected else "down")

    def limit(self, name: str, bits_per_s: int) -> None:
        """Bound the rate of a machine's link, in each direction."""
        shape = ("root", "tbf", "rate", f"{bits_per_s}bit", "burst", "256kb", "latency", "50ms")
        ends = ((self._namespace(name), "eth0"), (self._tag, self._cable(name)))
        for namespace, device in ends:
            run_ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, *shape)

    def received_bytes(self, name: str) -> int:
        """Return the bytes that have come to a machine over its link, with all headers."""
        told = subprocess.run(
            ["ip", "-json", "-statistics", "-n", self._namespace(name), "link", "show", "eth0"],
            capture_output=True,
            check=True,
        )
        return int(orjson.loads(told.stdout)[0]["stats64"]["rx"]["bytes"])

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Run the block in the network of a machine: this thread, and those that it starts."""
        before = Path(f"/proc/{os.getpid()}/fd/{os.open('/proc/thread-self/ns/net', os.O_RDONLY)}")
        try:
            self.enter(name)
            yield
        finally:
            _set_network(before)
            os.close(int(before.name))

    def enter(self, name: str) -> None:
        """Move this thread, and those that it starts, to the network of a machine."""
        _set_network(Path("/run/netns", self._namespace(name)))

    def _add(self, name: str) -> None:
        namespace, cable = self._namespace(name), self._cable(name)
        run_ip("netns", "add", namespace)
        self._hosts_of(name).parent.mkdir(parents=True)
        self._hosts_of(name).write_text("127.0.0.1 localhost\n")
        run_ip("link", "add", cable, "netns", self._tag, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        run_ip("-n", self._tag, "link", "set", cable, "master", "switch", "up")
        run_ip("-n", namespace, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run_ip("-n", namespace, "link", "set", device, "up")

    def _hosts_of(self, name: str) -> Path:
        return _FILES / self._namespace(name) / "hosts"

    def _namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _cable(self, name: str) -> str:
        return f"to{self._number[name]}"

    def _remove(self) -> None:
        for namespace in (*map(self._namespace, self._number), self._tag):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            shutil.rmtree(_FILES / namespace, ignore_errors=True)


def _set_network(namespace: Path) -> None:
    libc, descriptor = ctypes.CDLL(None, use_errno=True), os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(descriptor)
