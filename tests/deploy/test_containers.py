"""The container commands of the manifests and of the compose file make a fleet that samples, drains and adds up.

Each runs as written: as another user, without capabilities, on a read-only root, with 64 MiB of /dev/shm.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from documentation.blocks import Page

from headrace.schemas.errors import ExitCode
from support.containers import compose, pods, sandbox
from support.containers.container import Container, Image, image_of
from support.containers.fleet import Machine, assert_drained, await_commits, await_progress, make_secrets, of
from support.containers.kustomize import Object, build, pod_spec
from support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.netns]

TRIED = """
resources: [../small]
components: [../remote-envs]
replicas: [{name: headrace-env-host, count: 1}]
"""
KILLED = "as_services"
"""The way in which a worker's container is killed too; once, for the time that it takes."""
ENGINES = ("docker ", "kubectl ")
"""Commands of the pages that need an engine: the tests do what these would do."""


@pytest.fixture
def image(root: Path) -> Image:
    return image_of(root / "deploy" / "container" / "Dockerfile")


@pytest.fixture
def kubernetes(root: Path, tmp_path: Path) -> Path:
    """A copy of the manifests with keys, and with an overlay `tried`."""
    copy = tmp_path / "deploy" / "kubernetes"
    shutil.copytree(root / "deploy" / "kubernetes", copy, ignore=shutil.ignore_patterns("keys"))
    make_secrets(copy / "secrets" / "keys", "headrace-redis")
    (copy / "tried").mkdir()
    (copy / "tried" / "kustomization.yaml").write_text(TRIED)
    return copy


@pytest.fixture
def as_pods(kubernetes: Path, image: Image, tmp_path: Path) -> tuple[list[Container], list[str]]:
    objects = build(kubernetes / "tried")
    return list(pods.containers(objects, image, tmp_path / "pods")), pods.service_names(objects)


@pytest.fixture
def container(root: Path, tmp_path: Path) -> Path:
    """A copy of the folder of the compose file, with keys."""
    copy = tmp_path / "container"
    shutil.copytree(root / "deploy" / "container", copy, ignore=shutil.ignore_patterns("keys", "data"))
    make_secrets(copy / "keys", "redis")
    return copy


@pytest.fixture
def as_services(container: Path, image: Image) -> tuple[list[Container], list[str]]:
    services = list(compose.read_compose(container / "compose.yaml")["services"])
    return list(compose.containers(container / "compose.yaml", image)), services


@pytest.fixture
def machine(root: Path, tmp_path: Path) -> Iterator[Machine]:
    if why := sandbox.what_is_missing():
        pytest.skip(why)
    with ExitStack() as stack:
        yield Machine(stack, root, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["as_pods", "as_services"])
def test_the_containers_make_a_fleet_that_samples_and_drains(
    way: str, machine: Machine, request: pytest.FixtureRequest
) -> None:
    fleet = machine.start(*request.getfixturevalue(way))
    await_progress(fleet)
    for box in fleet.values():
        if box.container.alive:
            assert box.run(box.container.alive).returncode == 0, box.container.name
    worker = of(fleet, "worker")[0]
    assert_no_rights(worker)
    if way == KILLED:
        worker.kill()
        fleet[worker.container.name] = machine.run(worker.container)
        await_progress(fleet)
    assert_drained(fleet)


def run_block(text: str, folder: Path) -> None:
    """Run a block of a page there, without the commands of an engine."""
    lines = [line for line in text.splitlines() if not line.startswith(ENGINES)]
    own = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euc", "\n".join(lines)]
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_refused(machine: Machine, worker: Container, folder: Path) -> None:
    """A worker's container with these keys, in a place of its own, ends with the error of a refused key."""
    elsewhere = {path: folder / Path(path).name for path in worker.folders}
    box = machine.run(replace(worker, name=f"{worker.name}-of-before", folders=elsewhere))
    assert box.ends() == ExitCode.KEYS, box.log.read_text()


@pytest.mark.thorough
def test_containers_of_one_host_change_keys_and_move_by_the_commands_of_their_page(
    container: Path,
    image: Image,
    as_services: tuple[list[Container], list[str]],
    machine: Machine,
    root: Path,
    tmp_path: Path,
) -> None:
    page = Page(root / "docs" / "guides" / "deploy" / "containers.md")
    found, hosts = as_services

    fleet = machine.start(found, hosts)
    await_progress(fleet)
    before = fleet["worker"].container
    shutil.copytree(container / "keys", stolen := tmp_path / "stolen")
    os.chown(stolen / "worker.secret", before.user, before.user)
    os.chown(stolen / "supervisor.secret", before.user, before.user)
    assert fleet["worker"].ends_in_time() == 0
    run_block(page.block_with("for role in worker supervisor; do headrace keys revoke "), container)
    found = list(compose.containers(container / "compose.yaml", image))
    machine.replace(fleet, [one for one in found if one.name in ("broker", "worker")])
    files = {path: stolen / file.name if "keys" in file.parts else file for path, file in before.files.items()}
    assert_refused(machine, replace(before, files=files), tmp_path / "elsewhere")
    await_commits(fleet, 2_000)

    assert_drained(fleet)
    moved = tmp_path / "moved"
    run_block(page.line("cp -a ").replace("/srv/headrace", str(moved)), container)
    container.rename(tmp_path / "left")
    fleet = machine.start(list(compose.containers(moved / "compose.yaml", image)), hosts)
    await_commits(fleet, 2_000)
    assert_drained(fleet)


@pytest.mark.thorough
def test_pods_change_keys_beside_a_broker_that_runs_on_and_the_broker_moves_without_its_volume(
    kubernetes: Path,
    image: Image,
    as_pods: tuple[list[Container], list[str]],
    machine: Machine,
    root: Path,
    tmp_path: Path,
) -> None:
    page = Page(root / "docs" / "guides" / "deploy" / "kubernetes.md")
    fleet = machine.start(*as_pods)
    await_progress(fleet)
    broker, worker = fleet["headrace-broker-0"], fleet["headrace-worker-0"].container

    for box in of(fleet, "worker"):
        assert box.ends_in_time() == 0, box.log.read_text()
    earlier = build(kubernetes / "tried")
    run_block(page.block_with("for role in worker supervisor; do headrace keys revoke "), tmp_path)
    objects = build(kubernetes / "tried")
    content = [one for one in objects if "data" in one]
    changed = {one["metadata"]["name"] for one in content if one not in earlier}

    def using(is_renamed: bool, place: Path) -> list[Container]:
        """Return the containers with a changed Secret, which got another name or not, with their files in `place`."""
        secrets = {name for name in changed if name.endswith("-suffix") is is_renamed}
        return list(pods.containers([*content, *(one for one in objects if secrets_of(one) & secrets)], image, place))

    assert [one.name for one in using(False, tmp_path / "pods")] == [broker.container.name], "its files are new now"
    replaced = using(True, tmp_path / "replaced")
    assert {one.name for one in replaced} == {"headrace-worker-0", "headrace-remote-worker-0", "headrace-env-host-0"}
    machine.replace(fleet, replaced)
    wait_until(
        lambda: "is admitted from now on" in broker.log.read_text(), "the broker's look at its keys", pause_s=0.5
    )
    assert_refused(machine, worker, tmp_path / "elsewhere")
    await_commits(fleet, 2_000)
    assert not broker.has_ended, "it needs no restart"

    assert broker.ends_in_time() == 0
    shutil.rmtree(broker.container.folders["/var/lib/headrace"])
    fleet[broker.container.name] = machine.run(broker.container)
    await_commits(fleet, 2_000)
    assert_drained(fleet)


def secrets_of(one: Object) -> set[str]:
    """Return the names of the Secrets that the pods of an object have."""
    volumes = (pod_spec(one) or {}).get("volumes", ())
    return {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


ADMIN = "redis://admin:a-password-of-the-test@headrace-redis:6379/0"
KEY = "headrace:{an-earlier-fleet}:fleet"
PUT, ASK = (
    f"import redis; print(redis.Redis.from_url({ADMIN!r}).{call})" for call in (f"hset({KEY!r}, 'a', 1)", "dbsize()")
)


def test_the_cleaning_job_removes_the_keys_of_the_fleet_that_it_names(
    as_pods: tuple[list[Container], list[str]], root: Path, image: Image, machine: Machine, tmp_path: Path
) -> None:
    found, hosts = as_pods
    job = yaml.safe_load((root / "deploy" / "kubernetes" / "cleaning" / "cronjob.yaml").read_text())
    secret = {"kind": "Secret", "metadata": {"name": "headrace-redis-admin"}}
    secret["data"] = {"redis.url": base64.b64encode(f"{ADMIN}\n".encode()).decode()}  # type: ignore[assignment]
    [cleaning] = pods.containers([job, secret], image, tmp_path / "jobs")
    [redis] = [one for one in found if "redis" in one.name]
    with redis.files["/etc/valkey/users.acl"].open("a") as users:
        users.write("user admin on >a-password-of-the-test ~* +@all\n")
    [box] = machine.start([redis], hosts).values()
    wait_until(lambda: box.run(["python", "-c", PUT]).returncode == 0, f"Redis {box.log.read_text()}", pause_s=0.3)
    assert box.run(["python", "-c", ASK]).stdout == "1\n"
    assert (job_box := machine.run(cleaning)).ends() == 0, job_box.log.read_text()
    assert box.run(["python", "-c", ASK]).stdout == "0\n"


def assert_no_rights(box: sandbox.Sandbox) -> None:
    """The sandbox is what it says: otherwise a command that needs more would pass here, and fail in a cluster."""
    status = box.run(["cat", "/proc/1/status"]).stdout
    assert "Uid:\t10001\t10001\t10001\t10001" in status
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    for path in ("/x", "/etc/x", "/usr/x", "/etc/headrace/keys/x"):
        assert "Read-only file system" in (said := box.run(["touch", path]).stderr) or "Permission denied" in said
    size = box.run(["df", "--output=size", "/dev/shm"]).stdout.split()[-1]
    assert size == str(64 * 1024)
