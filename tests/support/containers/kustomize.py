"""As much of kustomize as the manifests use: what `kustomize build` gives, where that program is missing.

A field that is not known here is an error, so that a manifest cannot use what this does not do.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
_KNOWN = {
    *("apiVersion", "kind", "resources", "components", "configMapGenerator", "secretGenerator"),
    *("labels", "images", "replicas", "namespace", "patches"),
}
_CLUSTER_WIDE = ("Namespace", "PriorityClass")
_SUFFIX = "-suffix"
"""In place of the digest of the content."""


def build(folder: Path) -> list[Object]:
    """Return the objects of the kustomization in `folder`."""
    return _with_generated_names(_apply(folder, []))


def read_objects(text: str) -> list[Object]:
    """Return the objects in a text. An alias is a copy of what it names, and not the same object."""
    found: list[Object] = json.loads(json.dumps(list(yaml.safe_load_all(text))))
    return found


def _apply(folder: Path, objects: list[Object]) -> list[Object]:
    wanted = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(wanted) <= _KNOWN, f"{folder} uses {set(wanted) - _KNOWN}"
    for name in wanted.get("resources", ()):
        path = folder / name
        objects += _apply(path, []) if path.is_dir() else read_objects(path.read_text())
    objects += _generated(folder, wanted)
    for name in wanted.get("components", ()):
        objects = _apply(folder / name, objects)
    for one in objects:
        _label(one, wanted.get("labels", ()))
        if wanted.get("namespace") and one["kind"] not in _CLUSTER_WIDE:
            one["metadata"]["namespace"] = wanted["namespace"]
        _scale_and_name_images(one, wanted)
    for patch in wanted.get("patches", ()):
        hit = [one for one in objects if _is_target(one, patch["target"])]
        assert hit, f"{folder}: no object is a target of {patch['target']}"
        for one in hit:
            _patch(one, yaml.safe_load(patch["patch"]))
    return objects


def _generated(folder: Path, wanted: Object) -> Iterator[Object]:
    for kind, key in (("ConfigMap", "configMapGenerator"), ("Secret", "secretGenerator")):
        for generator in wanted.get(key, ()):
            assert set(generator) <= {"name", "files", "options"}, generator
            pairs = [(name or path.rpartition("/")[2], folder / path) for name, path in map(_named, generator["files"])]
            content = {name: path.read_bytes() for name, path in pairs}
            fixed = generator.get("options", {}).get("disableNameSuffixHash", False)
            data = {n: base64.b64encode(b).decode() if kind == "Secret" else b.decode() for n, b in content.items()}
            yield {
                "apiVersion": "v1",
                "kind": kind,
                "metadata": {"name": generator["name"] + ("" if fixed else _SUFFIX)},
                "data": data,
                **({"type": "Opaque"} if kind == "Secret" else {}),
            }


def _named(file: str) -> tuple[str, str]:
    name, _, path = file.rpartition("=")
    return name, path


def _label(one: Object, rules: list[Object]) -> None:
    for rule in rules:
        assert set(rule) == {"pairs", "includeTemplates"}, rule
        spec = one.get("spec", {})
        templates = [spec["template"]] if "template" in spec else []
        for labelled in (one, *templates, *spec.get("volumeClaimTemplates", ())):
            labelled["metadata"].setdefault("labels", {}).update(rule["pairs"])


def _scale_and_name_images(one: Object, wanted: Object) -> None:
    for rule in wanted.get("replicas", ()):
        if one["metadata"]["name"] == rule["name"] and "replicas" in one.get("spec", {}):
            one["spec"]["replicas"] = rule["count"]
    for rule in wanted.get("images", ()):
        for container in (pod_spec(one) or {}).get("containers", ()):
            if container["image"].partition(":")[0] == rule["name"]:
                container["image"] = f"{rule.get('newName', rule['name'])}:{rule['newTag']}"


def pod_spec(one: Object) -> Object | None:
    """Return the specification of the object's pods, if it has any."""
    spec = one.get("spec", {})
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    found: Object | None = spec.get("template", {}).get("spec")
    return found


def _is_target(one: Object, target: Object) -> bool:
    assert set(target) <= {"kind", "labelSelector"}, target
    if not re.fullmatch(target["kind"], one["kind"]):
        return False
    selector = target.get("labelSelector")
    if selector is None:
        return True
    matched = re.fullmatch(r"(\S+) in \((.*)\)", selector)
    assert matched is not None, selector
    return one["metadata"].get("labels", {}).get(matched[1]) in [value.strip() for value in matched[2].split(",")]


def _patch(one: Object, operations: list[Object]) -> None:
    for operation in operations:
        assert operation["op"] in ("add", "replace"), operation
        *parents, last = operation["path"].strip("/").split("/")
        place: Any = one
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place[name]
        assert operation["op"] == "add" or last in place, f"{operation['path']} is not in {one['metadata']['name']}"
        place[last] = operation["value"]


def _with_generated_names(objects: list[Object]) -> list[Object]:
    """Name what was generated wherever a pod uses it."""
    generated = {one["metadata"]["name"] for one in objects if one["kind"] in ("ConfigMap", "Secret")}
    for one in objects:
        for volume in (pod_spec(one) or {}).get("volumes", ()):
            for kind, key in (("configMap", "name"), ("secret", "secretName")):
                if kind in volume and volume[kind][key] not in generated:
                    volume[kind][key] += _SUFFIX
                    assert volume[kind][key] in generated, f"no object has the name {volume[kind][key]}"
    return objects
