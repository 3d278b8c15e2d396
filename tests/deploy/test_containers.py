"""The container commands of the manifests and of the compose file make a fleet that samples, drains and adds up.

Each runs as written: as another user, without capabilities, on a read-only root, with 64 MiB of /dev/shm.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest
import yaml

from headrace.deploy.run.key_pairs import make_keys
from headrace.deploy.run.redis_users import make_users
from support.containers import compose, pods, sandbox
from support.containers.container import Container, Image, image_of
from support.containers.kustomize import build
from support.waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.netns]

SETTINGS = "/etc/headrace/settings/fleet.toml"
TRIED = """
resources: [../small]
components: [../remote-envs]
replicas: [{name: headrace-env-host, count: 1}]
"""
KILLED = "as_services"
"""The way in which a worker's container is killed too; once, for the time that it takes."""
Fleet = dict[str, sandbox.Sandbox]


@pytest.fixture
def image(root: Path) -> Image:
    return image_of(root / "deploy" / "container" / "Dockerfile")


def make_secrets(folder: Path, redis: str) -> None:
    """Make keys and users of Redis as the guides say: users as a file for the server, and URLs with its name."""
    make_keys(folder, force=False)
    users = make_users(folder, "demo")
    lines = [" ".join(["user", *command[2:]]) for command in users.commands()]
    (folder / "users.acl").write_text("\n".join(["user default off", *lines, ""]))
    for file in folder.glob("*.url"):
        file.write_text(file.read_text().replace("127.0.0.1", redis))


@pytest.fixture
def as_pods(root: Path, image: Image, tmp_path: Path) -> tuple[list[Container], list[str]]:
    copy = tmp_path / "kubernetes"
    shutil.copytree(root / "deploy" / "kubernetes", copy, ignore=shutil.ignore_patterns("keys"))
    make_secrets(copy / "secrets" / "keys", "headrace-redis")
    (copy / "tried").mkdir()
    (copy / "tried" / "kustomization.yaml").write_text(TRIED)
    objects = build(copy / "tried")
    return list(pods.containers(objects, image, tmp_path / "pods")), pods.service_names(objects)


@pytest.fixture
def as_services(root: Path, image: Image, tmp_path: Path) -> tuple[list[Container], list[str]]:
    copy = tmp_path / "container"
    shutil.copytree(root / "deploy" / "container", copy, ignore=shutil.ignore_patterns("keys", "data"))
    make_secrets(copy / "keys", "redis")
    services = list(compose.read_compose(copy / "compose.yaml")["services"])
    return list(compose.containers(copy / "compose.yaml", image)), services


class Machine:
    """Runs containers in one network; those that still run at its end are killed."""

    def __init__(self, stack: ExitStack, root: Path, scratch: Path) -> None:
        self._stack, self._root, self._scratch = stack, root, scratch
        self._network = stack.enter_context(sandbox.network())
        self._hosts: list[str] = []

    def start(self, containers: list[Container], hosts: list[str]) -> Fleet:
        """Start all at the same time. `hosts` are the names that they know."""
        self._hosts = hosts
        return {one.name: self.run(one) for one in containers}

    def run(self, container: Container) -> sandbox.Sandbox:
        """Start a container, in the volumes that its earlier life has left."""
        box = sandbox.Sandbox(container, self._network, self._hosts, self._scratch, self._root)
        return self._stack.enter_context(box)


@pytest.fixture
def machine(root: Path, tmp_path: Path) -> Iterator[Machine]:
    if why := sandbox.what_is_missing():
        pytest.skip(why)
    with ExitStack() as stack:
        yield Machine(stack, root, tmp_path)


def of(fleet: Fleet, part: str) -> list[sandbox.Sandbox]:
    return [box for name, box in fleet.items() if part in name]


def await_steps(fleet: Fleet) -> None:
    """Wait until each role makes progress, as its own probe says."""
    for box in (one for part in ("broker", "worker", "learner", "env-host") for one in of(fleet, part)):
        wait_until(lambda box=box: is_ready(box), f"progress of {box.container.name}", pause_s=1.0)


def is_ready(box: sandbox.Sandbox) -> bool:
    assert not box.has_ended, f"{box.container.name} has ended: {box.log.read_text()}"
    return box.run(box.container.ready or [*box.container.alive, "--ready"]).returncode == 0


def assert_drained(fleet: Fleet) -> None:
    """Stop the workers, look at the books, and stop the rest: each ends by itself within its grace period."""
    [broker] = of(fleet, "broker")
    for box in of(fleet, "worker"):
        assert box.ends_in_time() == 0, box.log.read_text()
    for box in of(fleet, "learner"):
        assert box.ends_in_time() == 0, box.log.read_text()
    audit = broker.run(["headrace", "audit", "--strict", "--json", "--config", SETTINGS])
    assert audit.returncode == 0, audit.stdout + audit.stderr
    books = orjson.loads(audit.stdout)
    assert books["ledger"]["committed"][0] > 0
    assert all(row["closed"] for row in books["rows"]), "of the worker that was killed too"
    for part in ("env-host", "exporter", "dashboard", "broker", "redis"):
        for box in of(fleet, part):
            assert box.ends_in_time() == 0, box.log.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["as_pods", "as_services"])
def test_the_containers_make_a_fleet_that_samples_and_drains(
    way: str, machine: Machine, request: pytest.FixtureRequest
) -> None:
    fleet = machine.start(*request.getfixturevalue(way))
    await_steps(fleet)
    for box in fleet.values():
        if box.container.alive:
            assert box.run(box.container.alive).returncode == 0, box.container.name
    worker = of(fleet, "worker")[0]
    assert_no_rights(worker)
    if way == KILLED:
        worker.kill()
        fleet[worker.container.name] = machine.run(worker.container)
        await_steps(fleet)
    assert_drained(fleet)


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
