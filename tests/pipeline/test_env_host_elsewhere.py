"""A worker and its env host in two network namespaces: network faults change no chunk."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from headrace.deploy.run.key_pairs import make_keys
from support.fleets.two_machines import NoNamespacesError, TwoMachines

pytestmark = [pytest.mark.netns, pytest.mark.slow]

PORT = 5800
HasShown = Callable[[], bool]
"""Returns True once the network fault has taken effect."""

WORKER = """
import hashlib, select, sys, orjson
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner

def fragment(sampler):
    digest = hashlib.blake2b()
    for chunk in sampler.sample_fragment():
        for array in (chunk.obs, chunk.actions, chunk.rewards):
            digest.update(chunk.episode_id.encode() + array.tobytes())
    return digest.digest()

common = {"env": sys.argv[4], "num_envs": 4, "seed": 3, "rollout_fragment_length": 8}
remote = {"env_placement": "remote", "env_hosts_host": sys.argv[1], "env_hosts_port": int(sys.argv[2])}
with SingleAgentEnvRunner(EnvRunnerConfig(**common, **remote, env_hosts_keys=sys.argv[3]), run_uid="x") as sampler:
    found = []
    while not select.select([sys.stdin], [], [], 0)[0] or len(found) < 8:
        found.append(fragment(sampler))
        print(len(found), flush=True)
    t = sampler.totals
    balance = t.stepped - t.open - t.delivered - sum(t.discarded.values())
with SingleAgentEnvRunner(EnvRunnerConfig(**common), run_uid="x") as sampler:
    same = all(fragment(sampler) == one for one in found)
print(orjson.dumps({"same": same, "discarded": t.discarded, "balance": balance, "fragments": len(found)}).decode())
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    with ExitStack() as stack:
        try:
            two = stack.enter_context(TwoMachines())
        except NoNamespacesError as error:
            pytest.skip(str(error))
        yield two


def do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


def device(machines: TwoMachines) -> str:
    """The end of the cable at the env host's."""
    listed = subprocess.run(["ip", "-n", machines.there, "-o", "link"], capture_output=True, text=True, check=True)
    return next(line.split(": ")[1].partition("@")[0] for line in listed.stdout.splitlines() if ": lo:" not in line)


def number_after(word: str, *command: str) -> int:
    """The first number after `word` in what the command says."""
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"\d+", said.partition(word)[2])[0])


def pull_the_cable_for_3_s(machines: TwoMachines) -> HasShown:
    do("ip", "-n", machines.there, "link", "set", device(machines), "down")
    threading.Event().wait(3.0)  # the outage itself
    do("ip", "-n", machines.there, "link", "set", device(machines), "up")
    return lambda: True


def lose_3_percent(machines: TwoMachines) -> HasShown:
    drop = ("-m", "statistic", "--mode", "random", "--probability", "0.03", "-j", "DROP")
    do(*machines.command(machines.there, "iptables", "-A", "INPUT", *drop))
    do(*machines.command(machines.here, "iptables", "-A", "INPUT", *drop))
    listed = "iptables", "-nvxL", "INPUT"
    return lambda: all(
        number_after("destination", *machines.command(machine, *listed)) >= 3
        for machine in (machines.here, machines.there)
    )


def narrow_to_8_mbit(machines: TwoMachines) -> HasShown:
    """With a short queue, so that packets are dropped as well."""
    bucket = ("tbf", "rate", "8mbit", "burst", "8kb", "limit", "12kb")
    do(*machines.command(machines.there, "tc", "qdisc", "add", "dev", device(machines), "root", *bucket))
    listed = machines.command(machines.there, "tc", "-s", "qdisc", "show", "dev", device(machines))
    return lambda: number_after("dropped", *listed) > 0


def mend(machines: TwoMachines) -> None:
    """Undo all of it."""
    for name in (machines.here, machines.there):
        subprocess.run(machines.command(name, "iptables", "-F"), capture_output=True, check=False)
    command = machines.command(machines.there, "tc", "qdisc", "del", "dev", device(machines), "root")
    subprocess.run(command, capture_output=True, check=False)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("trouble", [pull_the_cable_for_3_s, lose_3_percent, narrow_to_8_mbit])
def test_network_faults_lose_no_step_and_repeat_no_step(
    trouble: Callable[[TwoMachines], HasShown], machines: TwoMachines, tmp_path: Path
) -> None:
    if trouble is lose_3_percent and shutil.which("iptables") is None:
        pytest.skip("losing packets needs iptables")
    keys, part = tmp_path / "keys", tmp_path / "part"
    make_keys(keys)
    part.mkdir(mode=0o700)
    for name in ("env-host.secret", "worker.public"):
        shutil.copy2(keys / name, part)
    env = "CartPole-v1" if trouble is not narrow_to_8_mbit else "support.envs.pictures:Pictures"
    arguments = [machines.HERE, str(PORT), str(keys), env]
    worker = subprocess.Popen(
        machines.command(machines.here, sys.executable, "-c", WORKER, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    offer = ["env-host", "--connect", f"tcp://{machines.HERE}:{PORT}", "--env", env, "--num-envs", "4"]
    host = subprocess.Popen(
        machines.command(machines.there, sys.executable, "-m", "headrace.deploy", *offer, "--set", f"keys.dir={part}"),
        stderr=subprocess.DEVNULL,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        assert worker.stdout.readline() == "1\n"
        has_shown = trouble(machines)
        for line in worker.stdout:
            if int(line) >= 4 and has_shown():
                break
        worker.stdin.write("enough\n")
        worker.stdin.flush()
        said = worker.stdout.read().splitlines()
        found = orjson.loads(said[-1])
        assert found["same"], f"{found['fragments']} fragments"
        assert (found["discarded"], found["balance"]) == ({}, 0)
    finally:
        mend(machines)
        for process in (host, worker):
            process.terminate()
        for process in (host, worker):
            process.wait(100)
        worker.stdin.close()
        worker.stdout.close()
