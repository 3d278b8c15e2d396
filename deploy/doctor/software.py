"""Checks of the software on this machine: Python, packages, libzmq, the kernel, and GPUs that torch can use."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import zmq

from headrace.deploy.doctor.check import Check, Verdict

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


def software_checks() -> Iterator[Check]:
    """Check everything that is installed."""
    yield Check("python", Verdict.OK, f"{sys.version.split()[0]} at {sys.executable}")  # pip refuses an older one
    for name in ("torch", "gymnasium", "numpy", "zmq", "redis"):
        yield _package(name)
    yield _zmq()
    yield _pidfd()
    yield _gpu()


def _package(name: str) -> Check:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return Check(name, Verdict.FAIL, str(error), "install Headrace again: pip install headrace")
    return Check(name, Verdict.OK, str(getattr(module, "__version__", "installed")))


def _zmq() -> Check:
    seen = f"libzmq {zmq.zmq_version()}"
    if zmq.zmq_version_info() < (4, 2):
        return Check("libzmq", Verdict.FAIL, seen, "pip install --upgrade pyzmq")
    if not zmq.has("curve"):
        return Check("libzmq", Verdict.WARN, f"{seen} without CURVE", "other machines can be served only unencrypted")
    return Check("libzmq", Verdict.OK, seen)


def _pidfd() -> Check:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return Check("pidfd", Verdict.FAIL, str(error), "the supervisor needs Linux 5.3 or newer")
    return Check("pidfd", Verdict.OK, os.uname().release)


def _gpu() -> Check:
    """Say which GPUs torch sees. Workers and the reference learner need none."""
    devices = [device for device in _GPU_DEVICES if Path(device).exists()]
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(count))
    except (ImportError, RuntimeError) as error:
        return Check("gpu", Verdict.WARN, f"torch cannot look for one: {error}", "install a torch that fits the driver")
    if not count and devices:
        seen = f"{devices[0]} is there, and torch {torch.__version__} uses none"
        return Check("gpu", Verdict.WARN, seen, "a learner on it needs a torch that was built for its driver")
    seen = f"{count}: {names}; a learner of yours may use it" if count else "none, and none is needed"
    return Check("gpu", Verdict.OK, seen)
