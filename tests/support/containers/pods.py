"""The pods of built manifests as containers, with their volumes as kubelet makes them."""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.containers.container import Container, Image
from support.containers.kustomize import Object, pod_spec

_MIB = 1 << 20


def containers(objects: list[Object], image: Image, scratch: Path) -> Iterator[Container]:
    """Yield the container of each pod that is to run; pods of a Deployment have a number."""
    content = {one["metadata"]["name"]: _content(one) for one in objects if "data" in one}
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet", "CronJob"):
            for number in range(one["spec"].get("replicas", 1)):
                yield _container(f"{one['metadata']['name']}-{number}", pod_spec(one) or {}, content, image, scratch)


def service_names(objects: list[Object]) -> list[str]:
    """Return the names that resolve in the fleet's namespace."""
    return [one["metadata"]["name"] for one in objects if one["kind"] == "Service"]


def _content(one: Object) -> dict[str, bytes]:
    decode = base64.b64decode if one["kind"] == "Secret" else str.encode
    return {name: decode(text) for name, text in one["data"].items()}


def _container(name: str, spec: Object, content: dict[str, dict[str, bytes]], image: Image, scratch: Path) -> Container:
    [container] = spec["containers"]
    of_pod, own = spec["securityContext"], scratch / name
    is_ours = container["image"].rpartition("/")[2].partition(":")[0] == "headrace"
    variables = {pair["name"]: pair["value"] for pair in container.get("env", ())}
    files: dict[str, Path] = {}
    folders: dict[str, Path] = {}
    memory: dict[str, int] = {}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for mount in container["volumeMounts"]:
        volume, path = volumes.get(mount["name"], {}), mount["mountPath"]
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            memory[path] = int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi")) * _MIB
        elif "configMap" in volume or "secret" in volume:
            files |= _files(volume, mount, content, own, of_pod["fsGroup"])
        else:
            folders[path] = own / mount["name"]
    probes = {kind: _command(container.get(kind, {})) for kind in ("livenessProbe", "readinessProbe")}
    return Container(
        name=name,
        command=[*image.entrypoint, *_expanded(container["args"], variables)] if is_ours else container["command"],
        environment={**(image.environment if is_ours else {}), **variables},
        user=of_pod["runAsUser"],
        files=files,
        folders=folders,
        memory=memory,
        grace_s=spec["terminationGracePeriodSeconds"],
        alive=probes["livenessProbe"],
        ready=probes["readinessProbe"],
    )


def _expanded(arguments: list[str], variables: dict[str, str]) -> list[str]:
    """Put variables in the place of $(NAME), as kubelet does."""
    return [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], one) for one in arguments]


def _files(volume: Any, mount: Any, content: dict[str, dict[str, bytes]], own: Path, group: int) -> dict[str, Path]:
    """Write the volume, and return its folder, or its one file that is mounted, by the path in the container.

    As kubelet does it, the names are links into the newest of its copies, which changes for all of them at once. Files
    of a Secret belong to root and to the pod's group, which may read them: kubelet adds that to `defaultMode`.
    """
    is_secret = "secret" in volume
    name = volume["secret"]["secretName"] if is_secret else volume["configMap"]["name"]
    folder = own / volume["name"]
    copy = folder / f"..{time.monotonic_ns()}"
    copy.mkdir(parents=True)
    for path in (folder, copy):
        path.chmod(0o755)
    for key, text in content[name].items():
        (copy / key).write_bytes(text)
        os.chown(copy / key, 0, group)
        (copy / key).chmod(volume["secret"]["defaultMode"] | 0o040 if is_secret else 0o644)
    (folder / "..new").symlink_to(copy.name)
    (folder / "..new").replace(folder / "..data")
    there = {path.name for path in folder.iterdir() if not path.name.startswith("..")}
    for key in content[name].keys() - there:
        (folder / key).symlink_to(f"..data/{key}")
    for key in there - content[name].keys():
        (folder / key).unlink()
    return {mount["mountPath"]: copy / mount["subPath"] if "subPath" in mount else folder}


def _command(probe: Any) -> list[str]:
    command: list[str] = probe.get("exec", {}).get("command", [])
    return command
