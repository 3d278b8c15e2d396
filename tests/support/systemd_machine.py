"""A machine that a real systemd boots: process 1 of namespaces of its own, with a root of its own by bubblewrap.

It sees this machine's /usr, which is read-only there, and of its units only those that a boot without hardware needs.
/etc is a folder of the test; /run, /tmp, /var and /opt are in memory. Its control groups are below one of ours.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import orjson

from support.containers.sandbox import SYSTEM, mounted
from support.fleets.machines import Machines
from support.waiting import PATIENCE, wait_until

_SYSTEMD = Path("/usr/lib/systemd/systemd")
_UNITS = Path("/usr/lib/systemd/system")
_BOOTED = (
    *("sysinit.target", "basic.target", "multi-user.target", "sockets.target", "timers.target", "paths.target"),
    *("slices.target", "local-fs.target", "swap.target", "network.target", "network-online.target"),
    *("shutdown.target", "umount.target", "systemd-journald.service", "systemd-journald.socket"),
)
_WANTED = {"sysinit.target": "systemd-journald.service", "sockets.target": "systemd-journald.socket"}
_PROGRAMS = ("bwrap", "ip", "nsenter", "useradd", "systemctl")
_FOLDERS = ("schemas", "broker", "workers", "learner_stub", "deploy")
_COMMAND_S = 300.0 * PATIENCE
_PREFIX = "/usr" if sys.base_prefix == "/usr" else "/opt/python"
"""Where this Python is on the machine: never in a home folder, since services see none."""
_PATH = ":".join(dict.fromkeys([f"{_PREFIX}/bin", "/usr/bin", "/usr/sbin"]))
_PROGRAM = """#!/opt/headrace/bin/python
from headrace.deploy.command.entry import main
main()
"""
_INIT = "exec env -i container=other PATH={path} LC_ALL=C {systemd} --system --unit=multi-user.target --show-status=no"


def what_is_missing() -> str:
    """Return why no systemd can be booted here; "" if one can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0:
        return "a machine of its own needs root"
    if missing or not _SYSTEMD.exists():
        return f"a machine of its own needs {', '.join([*missing, 'systemd'])}"
    return "" if _hierarchies() else "no hierarchy of control groups can be written here"


@dataclass(frozen=True)
class _Hierarchy:
    """A mounted hierarchy of control groups."""

    place: Path
    kind: str
    options: str

    def mount(self) -> str:
        """Return the commands that mount it on a machine of its own, which sees its own part."""
        options = f"-o {self.options} " if self.options else ""
        return f"mkdir -p {self.place} && mount -t {self.kind} {options}{self.kind} {self.place}"


def _hierarchies() -> list[_Hierarchy]:
    """Return those that can have a group of ours. A new group of `cpuset` takes no process, and is not needed."""
    found = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        own = [one for one in options.split(",") if one.startswith("name=") or Path(place).name == one]
        if kind in ("cgroup", "cgroup2") and os.access(place, os.W_OK) and own != ["cpuset"]:
            named = ["none"] if any(one.startswith("name=") for one in own) else []
            found.append(_Hierarchy(Path(place), kind, ",".join([*named, *own])))
    return found


class SystemdMachine:
    """The machine `name` of `network`, running systemd; use as a context manager. Headrace is in /opt/headrace there.

    - hosts: name -> address, for /etc/hosts.
    """

    def __init__(self, name: str, network: Machines, hosts: dict[str, str], folder: Path, root: Path) -> None:
        self.name, self.etc = name, folder / "etc"
        self._network, self._folder, self._root = network, folder, root
        self._group = f"headrace-{os.getpid()}-{name}"
        self._groups = [hierarchy.place / self._group for hierarchy in _hierarchies()]
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._write_files(hosts)

    def __enter__(self) -> Self:
        try:
            self._boot()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def run(self, command: str, *, check: bool = True) -> str:
        """Return what a command of bash prints there; AssertionError with all it said if it fails."""
        inside = ["nsenter", f"--target={self._pid}", "--all", "--root", "--wd"]
        shell = ["env", "-i", f"PATH=/opt/headrace/bin:{_PATH}", "LC_ALL=C", "bash", "-c", command]
        done = subprocess.run([*inside, *shell], capture_output=True, text=True, check=False, timeout=_COMMAND_S)
        assert done.returncode == 0 or not check, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def shows(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run(f"systemctl show --property={name} --value {unit}")

    def main_pid(self, unit: str) -> int:
        """Return the main process of a unit, as that machine numbers it; 0 for none."""
        return int(self.shows(unit, "MainPID"))

    def _boot(self) -> None:
        for group in self._groups:
            group.mkdir()
        enter = "".join(f"echo $$ > {shlex.quote(str(group))}/cgroup.procs; " for group in self._groups)
        read, write = os.pipe()
        command = [
            *self._network.command(self.name),
            "bwrap",
            "--info-fd",
            str(write),
            *self._mounts(),
            "/bin/sh",
            "/init",
        ]
        with (self._folder / "console.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-ec", f'{enter}exec "$@"', "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write,),
            )
        os.close(write)
        with os.fdopen(read) as told:
            answer = told.read()
        assert answer, log.name and Path(log.name).read_text()
        self._pid = orjson.loads(answer)["child-pid"]
        wait_until(self._is_up, f"systemd to run; its console is {log.name}")
        self.run(f"echo {_PREFIX}/lib > /etc/ld.so.conf && ldconfig && python3 -m venv --without-pip /opt/headrace")
        self.run(f"echo '{_PROGRAM}' > /opt/headrace/bin/headrace && chmod 755 /opt/headrace/bin/headrace")

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "console.log").read_text()
        return self.run("systemctl is-system-running", check=False) == "running"

    def _mounts(self) -> list[str]:
        own = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup", "--as-pid-1", "--die-with-parent"]
        own += [
            "--cap-add",
            "ALL",
            "--hostname",
            self.name,
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--ro-bind",
            "/sys",
            "/sys",
        ]
        for path in filter(os.path.lexists, SYSTEM):
            is_link = Path(path).is_symlink()
            own += ["--symlink", str(Path(path).readlink()), path] if is_link else []
        own += ["--ro-bind", "/usr", "/usr", "--bind", str(self.etc), "/etc", "--dir", "/root", "--dir", "/home"]
        own += ["--ro-bind", str(self._folder / "units"), str(_UNITS), "--tmpfs", "/usr/lib/systemd/system-generators"]
        for path in ("/run", "/tmp", "/var", "/opt"):
            own += ["--perms", "1777" if path == "/tmp" else "0755", "--tmpfs", path]
        if _PREFIX != "/usr":
            own += mounted(_PREFIX, "--ro-bind", sys.base_prefix)
        site = f"/opt/headrace/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        for name in _FOLDERS:
            own += mounted(f"{site}/headrace/{name}", "--ro-bind", str(self._root / name))
        own += mounted("/opt/borrowed", "--ro-bind", sysconfig.get_path("purelib"))
        own += mounted(f"{site}/borrowed.pth", "--ro-bind", str(self._folder / "borrowed.pth"))
        return [*own, "--ro-bind", str(self._folder / "init"), "/init", "--chdir", "/"]

    def _write_files(self, hosts: dict[str, str]) -> None:
        units, system = self._folder / "units", self.etc / "systemd" / "system"
        for folder in (units, system):
            folder.mkdir(parents=True)
        for name in _BOOTED:
            shutil.copy(_UNITS / name, units)
        for target, wanted in _WANTED.items():
            (units / f"{target}.wants").mkdir()
            (units / f"{target}.wants" / wanted).symlink_to(f"../{wanted}")
        for path in filter(os.path.isdir, ("/etc/ssl", "/etc/alternatives")):
            shutil.copytree(path, self.etc / Path(path).name, symlinks=True)
        shutil.copy("/etc/ld.so.cache", self.etc)
        (self.etc / "systemd" / "journald.conf").write_text("[Journal]\nStorage=volatile\nReadKMsg=no\n")
        shutil.copy("/etc/login.defs", self.etc)
        (self.etc / "passwd").write_text("root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n")
        (self.etc / "group").write_text("root:x:0:\nadm:x:4:\nnogroup:x:65534:\n")
        (self.etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (self.etc / "machine-id").write_text(os.urandom(16).hex() + "\n")
        lines = [f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **hosts}.items()]
        (self.etc / "hosts").write_text("".join(lines))
        (self._folder / "borrowed.pth").write_text("/opt/borrowed\n")
        groups = [f"mount -t tmpfs -o mode=755 tmpfs {Path('/sys/fs/cgroup')}"] if len(self._groups) > 1 else []
        lines = [
            "mount --make-rshared /",
            *groups,
            *(one.mount() for one in _hierarchies()),
            _INIT.format(path=_PATH, systemd=_SYSTEMD),
        ]
        (self._folder / "init").write_text("set -e\n" + "\n".join(lines) + "\n")

    def _remove(self) -> None:
        """Kill process 1, and with it all others of the machine, and remove its control groups."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        wait_until(lambda: not any(map(_is_left, self._groups)), f"the end of the control groups {self._group}")


def _is_left(group: Path) -> bool:
    """Remove a control group with all below it; return whether something of it is left, as processes that end."""
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()
    return group.exists()
