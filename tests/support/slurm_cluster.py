"""A real Slurm of its own, of Debian's slurm-wlm and munge: one controller and several nodes, all on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from support.ports import free_port
from support.waiting import PATIENCE, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
_LACKING = [name for name in PROGRAMS if shutil.which(name) is None]
_ROOT = 0
MISSING = f"not on PATH: {', '.join(_LACKING)}" if _LACKING else ""
MISSING = MISSING or ("" if os.geteuid() == _ROOT else "slurmd and munged with a key of their own need root")
"""Why no Slurm can be started here; "" where one can."""

START_S, END_S = 60.0 * PATIENCE, 200.0 * PATIENCE
_OVER = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}

# Slurm finds the controller by a name that must resolve, and refuses nodes with fewer CPUs than configured unless told
# otherwise. It looks at dependencies once a `sched_interval`. `KillWait` is what a job has between SIGTERM and SIGKILL.
# Without accounting, `squeue` alone knows of jobs.
_CONFIG = """
ClusterName=headrace
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=0,sched_interval=1
ReturnToService=2
KillWait=20
MailProg=/bin/true
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Nodes node1, node2, ... of `cpus` each; use as a context manager. All files are in `folder`.

    `environment` makes Slurm's commands, and jobs, talk to this cluster and to no other one.
    """

    def __init__(self, folder: Path, nodes: int = 3, cpus: int = 8) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "TMPDIR": str(folder)}
        self._nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self._cpus = cpus
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all jobs, then the daemons, and kill what is left of jobs."""
        if len(self._daemons) > 1:
            with contextlib.suppress(AssertionError, subprocess.SubprocessError):
                self.run("scancel", "--user=root")
                wait_until(lambda: not self._allocated(), "the end of all jobs", END_S, 0.1)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, *command: str, cwd: Path | None = None, check: bool = True) -> str:
        """Return what a command says that talks to this cluster."""
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, check=False, capture_output=True, text=True, timeout=END_S
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def jobs(self, *, over: bool = False) -> dict[str, str]:
        """Return job or task ("12", "13_0") -> state; those that are over too, for some minutes, if asked."""
        rows = self.run("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").splitlines()
        found = dict(row.split() for row in rows)
        return {job: state for job, state in found.items() if over or state not in _OVER}

    def wait_for(self, job: str, *states: str) -> None:
        """Wait until the job or task is in one of these states."""
        wait_until(lambda: self.jobs(over=True).get(job) in states, f"job {job} {' or '.join(states)}", END_S, 0.2)

    def processes(self) -> list[int]:
        """Return the pids of all processes of jobs of this cluster."""
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = path.read_bytes().split(b"\0")
                if mark in variables and any(one.startswith(b"SLURM_JOB_ID=") for one in variables):
                    found.append(int(path.parent.name))
        return found

    def _allocated(self) -> bool:
        return "alloc" in self.run("sinfo", "--noheader", "--format=%T") or bool(self.jobs())

    def _start(self) -> None:
        folder, host = self.folder, socket.gethostname()
        (folder / "state").mkdir(parents=True)
        (folder / "cgroup.conf").touch()
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={self._cpus} "
            "State=UNKNOWN\n"
            for name in self._nodes
        ]
        config = _CONFIG.format(host=host, port=free_port(), folder=folder)
        (folder / "slurm.conf").write_text("".join(nodes) + config)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": folder / "munge.sock", "pid-file": folder / "munge.pid"}
        files |= {"seed-file": folder / "munge.seed", "log-file": folder / "munge.log"}
        self._daemon("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        wait_until((folder / "munge.sock").exists, "munged's socket", START_S)
        self._daemon("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for name in self._nodes:
            self._daemon("slurmd", "-D", "-N", name, "-f", str(folder / "slurm.conf"))
        wait_until(self._is_idle, f"idle nodes (logs in {folder})", START_S, 0.1)

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=out, stderr=out))

    def _is_idle(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split()
        return states == ["idle"] * len(self._nodes)
