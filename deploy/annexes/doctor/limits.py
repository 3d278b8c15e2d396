"""Comparison of the memory, cores, tasks and files that the settings need with the limits of this process.

`headrace doctor` shows every comparison. `up` and the commands of roles log at their start each limit that is too low.
"""

from __future__ import annotations

import logging
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.deploy.annexes.doctor.cgroup import Limit, Limits, machine_memory, read_limits
from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.schemas.basics.process_usage import own_cores
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.deploy")

_MIB = 1 << 20
_FIRST_PROCESS, _EACH_PROCESS = 256 * _MIB, 100 * _MIB
"""Bytes, measured with CartPole-v1: torch and its modules, which forked processes share, and what each process adds."""
_TASKS_PER_PROCESS = 8
_FILES_PER_WORKER, _FILES_SPARE = 8, 256


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a start, computed from the settings. The user's envs and modules need more on top.

    `buffers`: the most bytes of batches that are kept until they are settled; `threads`: torch's threads, 0 without
    torch.
    """

    who: str
    processes: int
    threads: int
    buffers: int
    keys: str
    """The settings that bound the buffers."""

    @classmethod
    def of_role(cls, config: FleetConfig, role: str, workers: int = 1) -> Needs:
        """Return the needs of one role in a process of its own, of a group of `workers`, or of a whole `fleet`.

        A fleet of `headrace up` has broker, Redis and supervisor beside workers, learner and env hosts.
        """
        threads, key = config.sampling.torch_threads, "broker.max_held_bytes"
        held, kept = config.broker.max_held_bytes, config.window_bytes
        match role:
            case "fleet":
                workers, learners = config.fleet.workers, int(config.learner.enabled)
                who = f"{workers} worker{'s' if workers != 1 else ''}" + (" and a learner" if learners else "")
                processes = workers + config.fleet.env_hosts + learners + 3
                threads = workers * threads + learners * config.learner.torch_threads
                return cls(who, processes, threads, held + workers * kept, key)
            case "broker":
                return cls("a broker", 1, 0, held, key)
            case "learner":
                return cls("a learner", 1, config.learner.torch_threads, 0, "")
            case "env-host":
                envs = math.ceil(config.sampling.num_envs / config.sampling.envs_per_process)
                return cls(f"an env host with {envs} process{'es' if envs != 1 else ''} of envs", 1 + envs, 0, 0, "")
        who = "a worker" if workers == 1 else f"{workers} workers"
        return cls(who, workers, workers * threads, workers * kept, key)

    @property
    def least_memory(self) -> int:
        """Return the bytes that the processes take before they hold any batch."""
        return (_FIRST_PROCESS if self.threads else 0) + self.processes * _EACH_PROCESS


def warn_of_limits(config: FleetConfig, role: str, workers: int = 1) -> None:
    """Log each limit that is below the role's needs, in one sentence. The role `fleet` is that of `headrace up`."""
    for check in limit_checks(Needs.of_role(config, role, workers), read_limits()):
        if check.verdict is not Verdict.OK:
            log.warning("%s", check.in_words())


def limit_checks(needs: Needs, limits: Limits) -> Iterator[Check]:
    """Compare the needs with the limits of this process's control group, and with the machine."""
    yield memory_check(needs, limits.memory)
    yield core_check(needs, limits.cpus)
    yield task_check(needs, limits.tasks)


def memory_check(needs: Needs, limit: Limit | None) -> Check:
    """Compare the memory that the settings will use with what is allowed."""
    allowed = min((limit or machine_memory(), machine_memory()), key=lambda limit: limit.value)
    most = needs.least_memory + needs.buffers
    seen = f"{_mib(allowed.value)} by {allowed.where}, about {_mib(needs.least_memory)} needed for {needs.who}"
    if allowed.value < needs.least_memory:
        return Check("memory", Verdict.FAIL, seen, "raise the limit, or start fewer processes")
    seen += f", {_mib(most)} with full buffers"
    if allowed.value < most:
        return Check("memory", Verdict.WARN, seen, f"lower {needs.keys}, or raise the limit")
    return Check("memory", Verdict.OK, seen)


def core_check(needs: Needs, limit: Limit | None) -> Check:
    """Compare the threads of torch with the cores, or with the share of them that is allowed."""
    cores = Limit(own_cores(), "the machine")
    allowed = min((limit or cores, cores), key=lambda limit: limit.value)
    seen = f"{allowed.value:g} by {allowed.where}, {needs.threads} torch threads of {needs.who}"
    if needs.threads > allowed.value + 1:  # a learner computes while workers wait for its weights
        advice = "start fewer workers, or lower sampling.torch_threads and learner.torch_threads"
        return Check("cores", Verdict.WARN, seen, advice)
    return Check("cores", Verdict.OK, seen)


def task_check(needs: Needs, limit: Limit | None) -> Check:
    """Compare the processes and threads with what is allowed, by the control group and for this user."""
    need = needs.processes * _TASKS_PER_PROCESS + needs.threads
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # the kernel does not apply the user's limit to root
    own = None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else Limit(soft, "ulimit -u")
    limits = [found for found in (limit, own) if found is not None]
    if not limits:
        return Check("processes", Verdict.OK, f"no limit; about {need} processes and threads needed")
    allowed = min(limits, key=lambda limit: limit.value)
    seen = f"{allowed.value:g} by {allowed.where}, about {need} processes and threads needed"
    if allowed.value < need:
        return Check("processes", Verdict.WARN, seen, f"raise it to {2 * need} or more")
    return Check("processes", Verdict.OK, seen)


def open_files_check(workers: int) -> Check:
    """Compare the files that one process may open with what the supervisor of these workers needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _FILES_SPARE + _FILES_PER_WORKER * workers
    seen = f"{soft} allowed, about {need} needed"
    if soft != resource.RLIM_INFINITY and soft < need:
        return Check("open files", Verdict.WARN, seen, f"ulimit -n {2 * need}")
    return Check("open files", Verdict.OK, seen)


def _mib(size: float) -> str:
    return f"{size / _MIB:,.0f} MiB"
