"""The manifests are valid for each version that is named, agree with the settings, and give pods few rights."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from headrace.deploy.annexes.watch.exporter.metrics_text import exposed_name
from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.accounts.figures import GAUGE_TABLE
from headrace.schemas.accounts.redis_keys import LEARNER_TIME
from headrace.schemas.settings.config import DRAIN_TIMEOUT_S
from headrace.schemas.settings.config_loading import load_config
from support.containers.kustomize import Object, build, pod_spec

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
OVERLAYS = ("small", "production")
FORCED_S = 20.0
"""Seconds that a role may need in addition to its drain, before its pod is killed."""


@pytest.fixture(scope="module")
def kubernetes(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the manifests, with keys."""
    copy = tmp_path_factory.mktemp("copy") / "kubernetes"
    shutil.copytree(root / "deploy" / "kubernetes", copy, ignore=shutil.ignore_patterns("keys"))
    make_keys(copy / "secrets" / "keys", force=False)
    for name in ("redis-writer.url", "redis-reader.url", "users.acl"):
        (copy / "secrets" / "keys" / name).write_text("-\n")
    return copy


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest, kubernetes: Path) -> list[Object]:
    return build(kubernetes / request.param)


@pytest.fixture(scope="module")
def optional(root: Path) -> list[Object]:
    """Objects that stand beside the overlays."""
    folder = root / "deploy" / "kubernetes"
    hpa, keda, cleaning = (
        yaml.safe_load((folder / path).read_text())
        for path in ("autoscaling/hpa.yaml", "autoscaling/keda.yaml", "cleaning/cronjob.yaml")
    )
    return [hpa, autoscaler_of(keda), cleaning]


def autoscaler_of(scaled: Object) -> Object:
    """Return the HorizontalPodAutoscaler that KEDA makes of a ScaledObject with one trigger, by its documentation."""
    assert set(scaled) == {"apiVersion", "kind", "metadata", "spec"}
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = dict(scaled["spec"])
    (trigger,) = spec.pop("triggers")
    assert set(trigger) == {"type", "metricType", "metadata"}
    assert trigger["type"] == "prometheus"
    assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"}
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert trigger["metricType"] in ("Value", "AverageValue")
    assert isinstance(spec.pop("pollingInterval"), int)
    metric = {"metric": {"name": "s0-prometheus"}, "target": {"type": trigger["metricType"], "value": "200m"}}
    made = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", **spec.pop("scaleTargetRef")},
        "minReplicas": spec.pop("minReplicaCount"),
        "maxReplicas": spec.pop("maxReplicaCount"),
        "metrics": [{"type": "External", "external": metric}],
        **spec.pop("advanced").pop("horizontalPodAutoscalerConfig"),
    }
    assert not spec, "fields that are unknown here"
    about = {"name": f"keda-hpa-{scaled['metadata']['name']}", "namespace": scaled["metadata"]["namespace"]}
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": about, "spec": made}


@pytest.fixture(scope="module")
def settings(root: Path) -> Any:
    return load_config(root / "deploy/kubernetes/base/fleet.toml", {"redis.url": ""})[0]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def pods(objects: list[Object]) -> dict[str, Object]:
    return {one["metadata"]["name"]: spec for one in objects if (spec := pod_spec(one)) is not None}


def component(one: Object) -> str:
    return str(one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_valid(version: str, objects: list[Object], optional: list[Object]) -> None:
    for one in (*objects, *optional):
        kubernetes_validate.validate(one, version, strict=True)


def test_an_object_that_is_not_valid_is_found(objects: list[Object]) -> None:
    broken = yaml.safe_load(yaml.safe_dump(of_kind(objects, "Deployment")[0]))
    broken["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


KUSTOMIZE = next(
    (command for command in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(command[0])), []
)


@pytest.mark.thorough
@pytest.mark.skipif(not KUSTOMIZE, reason="neither kustomize nor kubectl is on PATH")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_and_the_test_builder_give_the_same_objects(overlay: str, kubernetes: Path) -> None:
    done = subprocess.run([*KUSTOMIZE, overlay], cwd=kubernetes, capture_output=True, text=True, check=True)
    theirs = re.sub(r"(headrace-[a-z-]+)-[0-9a-z]{10}\b", r"\1-suffix", done.stdout)

    def sorted_by_name(objects: list[Object]) -> list[Object]:
        for secret in of_kind(objects, "Secret"):
            secret["data"] = {name: "".join(lines.split()) for name, lines in secret["data"].items()}
        return sorted(objects, key=lambda one: (one["kind"], one["metadata"]["name"]))

    assert sorted_by_name(list(yaml.safe_load_all(theirs))) == sorted_by_name(build(kubernetes / overlay))


def test_no_pod_has_more_rights_than_it_needs(objects: list[Object], optional: list[Object]) -> None:
    """These are the rules of the level `restricted`, and a read-only root beside them."""
    for name, spec in pods([*objects, *optional]).items():
        assert spec["automountServiceAccountToken"] is False, name
        of_pod = spec["securityContext"]
        assert of_pod["runAsNonRoot"] is True, name
        assert of_pod["runAsUser"] == of_pod["runAsGroup"] == of_pod["fsGroup"] == 10001, name
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
            assert "memory" in container["resources"]["limits"], name


def test_secrets_are_for_the_pod_alone(objects: list[Object]) -> None:
    for name, spec in pods(objects).items():
        for volume in spec["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o400, name


def test_each_role_has_memory_for_dev_shm(objects: list[Object]) -> None:
    for name, spec in pods(objects).items():
        mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert set(mounts.values()) <= set(volumes) | {"run", "data"}, name
        if "headrace" in spec["containers"][0]["image"]:
            assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Mi"}, name


def test_the_grace_period_of_a_pod_is_longer_than_its_drain(objects: list[Object], settings: Any) -> None:
    for name, spec in pods(objects).items():
        drain_s = max(DRAIN_TIMEOUT_S, settings.supervisor.stop_timeout_s) if "worker" in name else 0.0
        assert spec["terminationGracePeriodSeconds"] >= drain_s + FORCED_S, name


def test_roles_are_probed_by_their_progress(objects: list[Object]) -> None:
    for one in of_kind(objects, "StatefulSet", "Deployment"):
        role, container = component(one).removeprefix("remote-"), one["spec"]["template"]["spec"]["containers"][0]
        assert {"livenessProbe", "readinessProbe"} <= set(container)
        if role in ("broker", "learner", "worker", "env-host"):
            plain = ["headrace", "health", "--role", role]
            assert container["livenessProbe"]["exec"]["command"] == plain
            assert container["startupProbe"]["exec"]["command"] == plain
            assert container["readinessProbe"]["exec"]["command"] == [*plain, "--ready"]


def test_services_and_pods_use_the_ports_of_the_settings(objects: list[Object], settings: Any) -> None:
    wanted = dict(settings.broker.ports)
    wanted["envs"] = settings.sampling.env_hosts_port  # of slot 0
    wanted |= {"redis": 6379}
    served: dict[str, int] = {}
    for service in of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            assert port["targetPort"] == port["name"]
            served[f"{service['metadata']['name']}:{port['name']}"] = port["port"]
            if port["name"] != "http":
                assert port["port"] == wanted[port["name"]], service["metadata"]["name"]
    for name, spec in pods(objects).items():
        container = spec["containers"][0]
        for port in container.get("ports", ()):
            if port["name"] != "http":
                assert port["containerPort"] == wanted[port["name"]], name
        arguments = " ".join(container.get("args", ()))
        for host in re.findall(r"dns://([a-z-]+)", arguments):
            assert {f"{host}:{one}" for one in settings.broker.ports} <= set(served), name
        for address in re.findall(r"tcp://([a-z-]+):(\d+)", arguments):
            assert int(address[1]) in [port for at, port in served.items() if at.startswith(f"{address[0]}:")], name


def test_each_service_selects_only_the_pods_of_its_name(objects: list[Object]) -> None:
    labelled = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in of_kind(objects, "Deployment", "StatefulSet")
    }
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"].items()
        assert [name for name, labels in labelled.items() if selector <= labels.items()] == [
            service["metadata"]["name"]
        ]
    for one in of_kind(objects, "StatefulSet"):
        assert one["spec"]["serviceName"] == one["metadata"]["name"]


def test_no_pod_fits_the_selector_of_another_controller(objects: list[Object]) -> None:
    controllers = of_kind(objects, "Deployment", "StatefulSet")
    for one in controllers:
        wanted = one["spec"]["selector"]["matchLabels"].items()
        chosen = [pod for pod in controllers if wanted <= pod["spec"]["template"]["metadata"]["labels"].items()]
        assert chosen == [one], one["metadata"]["name"]


def test_each_component_that_a_network_policy_names_exists(objects: list[Object]) -> None:
    label = "app.kubernetes.io/component"
    there = {component(one) for one in of_kind(objects, "Deployment", "StatefulSet")} | {
        "cleaning",
        "env-host",
        "remote-worker",
    }
    for policy in of_kind(objects, "NetworkPolicy"):
        named = re.findall(rf"'{re.escape(label)}': '([a-z-]+)'", str(policy["spec"]))
        assert set(named) <= there, policy["metadata"]["name"]
    guarded = {policy["spec"]["podSelector"]["matchLabels"].get(label) for policy in of_kind(objects, "NetworkPolicy")}
    assert {None, "broker", "redis", "exporter"} <= guarded, "all pods, and each that is reached by others"


def test_a_disruption_budget_covers_each_pod_but_exporter_and_dashboard(objects: list[Object]) -> None:
    budgets = [one["spec"]["selector"]["matchLabels"].items() for one in of_kind(objects, "PodDisruptionBudget")]
    for one in of_kind(objects, "Deployment", "StatefulSet"):
        labels = one["spec"]["template"]["metadata"]["labels"].items()
        covered = [budget for budget in budgets if budget <= labels]
        assert len(covered) == (0 if component(one) in ("exporter", "dashboard") else 1), one["metadata"]["name"]


def test_pods_of_a_role_that_has_several_are_spread_over_nodes(objects: list[Object]) -> None:
    for one in of_kind(objects, "Deployment"):
        if component(one) in ("worker", "env-host"):
            (spread,) = one["spec"]["template"]["spec"]["topologySpreadConstraints"]
            assert spread.pop("labelSelector") == one["spec"]["selector"], "pods of this Deployment alone"
            assert spread == {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
            }


def test_only_pods_that_a_service_sends_requests_by_http_wait_before_sigterm(objects: list[Object]) -> None:
    """The others end in order by SIGTERM, which tini passes on. A pause would only take time from their drain."""
    pauses = {name for name, spec in pods(objects).items() if "lifecycle" in spec["containers"][0]}
    asked = {name for name, spec in pods(objects).items() if "http" in str(spec["containers"][0].get("ports"))}
    assert pauses == asked == {"headrace-exporter", "headrace-dashboard"}
    for name in pauses:
        pause = pods(objects)[name]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert 0 < pause < pods(objects)[name]["terminationGracePeriodSeconds"], name


def test_the_manifests_repeat_no_value_of_the_settings_but_ports(kubernetes: Path, settings: Any) -> None:
    text = "\n".join(path.read_text() for path in sorted(kubernetes.rglob("*.yaml")))
    for value in (settings.fleet.fleet_id, settings.sampling.env):
        assert not re.search(rf"\b{re.escape(value)}\b", text), value


def test_the_commands_of_the_page_name_objects_that_exist(root: Path, kubernetes: Path) -> None:
    """The commands themselves need a cluster."""
    objects = build(kubernetes / "production")
    named = {(one["kind"].lower(), one["metadata"]["name"]) for one in objects}
    for kind, name in list(named):
        if kind == "statefulset":
            named |= {("pod", f"{name}-0"), ("exec", f"{name}-0")}
    claims = {
        f"{claim['metadata']['name']}-{one['metadata']['name']}-0"
        for one in of_kind(objects, "StatefulSet")
        for claim in one["spec"].get("volumeClaimTemplates", ())
    }
    containers = {
        (one["metadata"]["name"], container["name"])
        for one in objects
        for container in (pod_spec(one) or {}).get("containers", ())
    }
    text = (root / "docs" / "guides" / "deploy" / "kubernetes.md").read_text()
    found = re.findall(r"\b(deployment|statefulset|service|pod|exec|pvc)[ /]((?:run-)?headrace-[a-z0-9-]+)", text)
    assert len(found) > 10
    assert {pair for pair in found if pair[0] != "pvc"} <= named
    assert {name for kind, name in found if kind == "pvc"} == {"run-headrace-broker-0"} <= claims
    assert set(re.findall(r"set image \w+/(\S+) (\w+)=", text)) <= containers


def test_autoscaling_uses_an_exported_metric_of_the_fleet_in_its_namespace(kubernetes: Path) -> None:
    gauge = next(metric for metric in GAUGE_TABLE if metric.name == LEARNER_TIME)
    for name in ("hpa.yaml", "keda.yaml"):
        text = (kubernetes / "autoscaling" / name).read_text()
        assert f"{exposed_name(gauge.name)}" in text
        assert re.search(rf'{gauge.label}(="wait"|: wait)', text)
        namespace, spec = yaml.safe_load(text)["metadata"]["namespace"], text.partition("spec:")[2]
        assert f'namespace="{namespace}"' in spec or f"namespace: {namespace}," in spec


def test_compose_and_kubernetes_use_the_same_settings_of_redis(root: Path) -> None:
    one, other = root / "deploy/container/valkey.conf", root / "deploy/kubernetes/base/valkey.conf"
    assert one.read_bytes() == other.read_bytes()
