"""A fleet in containers on one machine: what starts them, waits for their progress, and stops them in order."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from headrace.deploy.run.key_pairs import make_keys
from headrace.deploy.run.redis_users import make_users
from support.containers import sandbox
from support.containers.container import Container
from support.waiting import wait_until

SETTINGS = "/etc/headrace/settings/fleet.toml"
Fleet = dict[str, sandbox.Sandbox]


def make_secrets(folder: Path, redis: str) -> None:
    """Make keys and users of Redis as the guides say: users as a file for the server, and URLs with its name."""
    make_keys(folder, force=False)
    lines = [command.replace("ACL SETUSER", "user") for command in make_users(folder, "demo")]
    (folder / "users.acl").write_text("\n".join(["user default off", *lines, ""]))
    for file in folder.glob("*.url"):
        file.write_text(file.read_text().replace("127.0.0.1", redis))


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

    def replace(self, fleet: Fleet, containers: list[Container]) -> None:
        """Stop the containers of these names where they run, and start these in their place."""
        for one in containers:
            if not fleet[one.name].has_ended:
                assert fleet[one.name].ends_in_time() == 0, fleet[one.name].log.read_text()
            fleet[one.name] = self.run(one)


def of(fleet: Fleet, part: str) -> list[sandbox.Sandbox]:
    """Return the containers whose name has `part`."""
    return [box for name, box in fleet.items() if part in name]


def await_progress(fleet: Fleet) -> None:
    """Wait until each role makes progress, as its own probe says."""
    for box in (one for part in ("broker", "worker", "learner", "env-host") for one in of(fleet, part)):
        wait_until(lambda box=box: _is_ready(box), f"progress of {box.container.name}", pause_s=1.0)


def _is_ready(box: sandbox.Sandbox) -> bool:
    assert not box.has_ended, f"{box.container.name} has ended: {box.log.read_text()}"
    return box.run(box.container.ready or [*box.container.alive, "--ready"]).returncode == 0


def await_commits(fleet: Fleet, steps: int) -> None:
    """Wait until the learner has committed `steps` more env steps than now."""
    before = _committed(fleet)
    wait_until(lambda: _committed(fleet) >= before + steps, f"{steps} more steps", pause_s=1.0)


def _committed(fleet: Fleet) -> int:
    """Return the env steps that are committed; 0 while the broker has told Redis of none."""
    told = _audit(fleet, "--json").stdout
    return int(orjson.loads(told)["ledger"]["committed"][0]) if told else 0


def _audit(fleet: Fleet, *options: str) -> Any:
    [broker] = of(fleet, "broker")
    return broker.run(["headrace", "audit", *options, "--config", SETTINGS])


def assert_drained(fleet: Fleet) -> None:
    """Stop the workers, look at the books, and stop the rest: each ends by itself within its grace period."""
    for box in of(fleet, "worker"):
        assert box.ends_in_time() == 0, box.log.read_text()
    for box in of(fleet, "learner"):
        assert box.ends_in_time() == 0, box.log.read_text()
    audit = _audit(fleet, "--strict", "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    books = orjson.loads(audit.stdout)
    assert books["ledger"]["committed"][0] > 0
    assert all(row["closed"] for row in books["rows"]), "of the worker that was killed too"
    for part in ("env-host", "exporter", "dashboard", "broker", "redis"):
        for box in of(fleet, part):
            assert box.ends_in_time() == 0, box.log.read_text()
