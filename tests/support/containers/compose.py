"""The services of our compose file as containers, with the fields that it uses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from support.containers.container import Container, Image

_KNOWN = {
    *("image", "user", "restart", "read_only", "cap_drop", "security_opt", "shm_size", "tmpfs", "networks", "configs"),
    *("command", "stop_grace_period", "volumes", "secrets", "healthcheck", "depends_on", "environment"),
    "ports",
}
_MIB = 1 << 20
_PROGRAMS = ("headrace", "python")


def read_compose(path: Path) -> Any:
    """Return the content of a compose file, with the defaults of its variables."""
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", path.read_text()))


def containers(path: Path, image: Image) -> Iterator[Container]:
    """Yield a container for each that `docker compose up` would start."""
    whole = read_compose(path)
    for name, service in whole["services"].items():
        assert set(service) <= _KNOWN, f"{name} uses {set(service) - _KNOWN}"
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        yield _container(name, service, whole, image, path.parent)


def _container(name: str, service: Any, whole: Any, image: Image, folder: Path) -> Container:
    is_ours = service["image"] == "headrace"
    user = int(service["user"].partition(":")[0])
    files = {
        one["target"]: folder / whole[kind][one["source"]]["file"]
        for kind in ("configs", "secrets")
        for one in service.get(kind, ())
    }
    for file in files.values():
        os.chown(file, user, user)
    binds = dict(volume.split(":")[::-1] for volume in service.get("volumes", ()))
    probe = service["healthcheck"]["test"]
    return Container(
        name=name,
        command=[*image.entrypoint, *service["command"]] if is_ours else service["command"],
        environment={**(image.environment if is_ours else {}), **service.get("environment", {})},
        user=user,
        files=files,
        folders={path: folder / source for path, source in binds.items()},
        memory={path.partition(":")[0]: 64 * _MIB for path in service["tmpfs"]}
        | {"/dev/shm": int(service["shm_size"].removesuffix("m")) * _MIB},
        grace_s=float(service["stop_grace_period"].removesuffix("s")),
        alive=probe[1:] if probe[1] in _PROGRAMS else (),
    )
