"""A wheel installs exactly the modules and data files of the repository, and the same commit gives the same bytes."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

FOLDERS = ("schemas", "broker", "workers", "learner_stub", "deploy")


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def source(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of a copy of the sources, so that nothing is left here, or found from before."""
    source = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / ".types" / "headrace", source / ".types" / "headrace", symlinks=True)
    (source / ".ci").mkdir()
    metadata = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "THIRD_PARTY.md", "CHANGELOG.md")
    for name in (*metadata, ".gitignore", ".ci/dist"):
        shutil.copy(root / name, source / name)
    author = ("-c", "user.name=nobody", "-c", "user.email=")
    for command in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "--message=all")):
        subprocess.run(["git", *command], cwd=source, check=True)
    return source


def _build(source: Path, out: Path) -> dict[str, bytes]:
    """Build the source archive and the wheel, and return their contents by name."""
    subprocess.run([source / ".ci" / "dist", sys.executable, out], check=True)
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


@pytest.fixture(scope="module")
def built(source: Path) -> dict[str, bytes]:
    return _build(source, source / "dist")


@pytest.fixture(scope="module")
def wheel(source: Path, built: dict[str, bytes]) -> Path:
    [name] = [name for name in built if name.endswith(".whl")]
    return source / "dist" / name


def test_each_folder_with_an_init_is_listed_as_a_package(root: Path, project: dict[str, Any]) -> None:
    inits = [path.parent.relative_to(root) for name in FOLDERS for path in (root / name).rglob("__init__.py")]
    packages = {"headrace." + ".".join(path.parts) for path in inits} - {"headrace.deploy.root_package"} | {"headrace"}
    assert sorted(packages) == sorted(project["tool"]["setuptools"]["packages"])


def test_each_folder_with_code_has_an_init(root: Path) -> None:
    for name in FOLDERS:
        for file in (root / name).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), file


def test_type_checkers_find_each_package_by_its_link(root: Path) -> None:
    links = {link.name: link.resolve() for link in (root / ".types" / "headrace").iterdir() if link.is_symlink()}
    of_root = [file for file in (root / "deploy" / "root_package").iterdir() if file.is_file()]
    assert links == {name: root / name for name in FOLDERS} | {file.name: file for file in of_root}


def test_no_module_bears_a_name_of_the_standard_library(root: Path) -> None:
    """`python workers/x.py` puts the folder itself on the path. `chunk`, of IFF files, is gone since Python 3.13."""
    names = {path.stem for name in FOLDERS for path in (root / name).rglob("*.py")}
    assert not names & (sys.stdlib_module_names - {"chunk"})


def test_the_wheel_holds_every_module_and_data_file(root: Path, wheel: Path, project: dict[str, Any]) -> None:
    wanted = {path.relative_to(root).as_posix() for name in FOLDERS for path in (root / name).rglob("*.py")}
    wanted |= (
        {"py.typed"} | {f"{name}/py.typed" for name in FOLDERS} | {"deploy/fleet.toml", "workers/serving/protocol.md"}
    )
    wanted |= {"py.typed", "deploy/clients/http_client.c", "deploy/clients/http_client.mjs"}
    own = ("ssh/*", "systemd/*.service", "systemd/*/*.conf", "skypilot/*.yaml", "slurm/*.sbatch", "slurm/*.sh")
    own += ("container/*", "kubernetes/*/*")
    for pattern in (
        "recipes/*.toml",
        "prometheus/*.yml",
        "grafana/*.json",
        "annexes/watch/page/assets/*",
        "annexes/watch/report/*.js",
        *own,
    ):
        files = [path for path in (root / "deploy").glob(pattern) if path.is_file()]
        wanted |= {path.relative_to(root).as_posix() for path in files}
    wanted = {path.removeprefix("deploy/root_package/") for path in wanted}
    with zipfile.ZipFile(wheel) as archive:
        held = {name.removeprefix("headrace/") for name in archive.namelist() if name.startswith("headrace/")}
        [metadata] = [archive.read(n).decode() for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    assert held == wanted
    assert f"Version: {project['project']['version']}" in metadata
    assert "License-Expression: Apache-2.0 AND MIT\n" in metadata
    links = re.findall(r"\]\(([^)]*)\)", metadata)
    page = f"https://github.com/headrace/headrace/blob/v{project['project']['version']}"
    assert f"{page}/docs/quickstart.md" in links
    assert [link for link in links if not link.startswith("https://")] == []  # PyPI has no file beside the README


def test_another_clone_of_the_commit_gives_the_same_bytes(
    source: Path, built: dict[str, bytes], tmp_path: Path
) -> None:
    """As another user made it, with another umask, and at another time."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", source, clone], check=True, umask=0o077)
    assert _build(clone, tmp_path / "dist") == built


def test_third_party_files_of_the_wheel_are_listed_with_their_digests_and_licences(root: Path, wheel: Path) -> None:
    table = (root / "THIRD_PARTY.md").read_text()
    listed = dict(re.findall(r"^\| `(\S+)` \| `(\w{64})` \|", table, re.MULTILINE))
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    package = {name.removeprefix("headrace/"): content for name, content in files.items() if "dist-info" not in name}
    found = {name for name, content in package.items() if _is_of_others(name, content)}
    assert found == set(listed)
    assert {name: hashlib.sha256(package[name]).hexdigest() for name in listed} == listed
    for licence in {"THIRD_PARTY.md", *re.findall(r"`(\S+\.LICENSE)`", table)}:
        assert [name for name in files if name.endswith(f".dist-info/licenses/{licence}")], licence
    version = re.search(rb"uPlot \(v(\S+)\)", package["deploy/annexes/watch/page/assets/uPlot.iife.min.js"])
    assert version
    assert f" {version[1].decode()}, " in table


def _is_of_others(name: str, content: bytes) -> bool:
    """Return whether the file is a font, minified or compiled, or has a notice of copyright. Our own have none."""
    if name.endswith(".LICENSE"):
        return False
    marks = rb"copyright|\(c\) *(19|20)\d\d|/\*!|@licen[sc]e|SPDX-|licen[sc]ed under|MIT licen[sc]e|BSD licen[sc]e"
    kind = re.search(r"\.min\.|\.(woff2?|ttf|otf|eot|wasm|so|pyd|png|jpe?g|gif|ico)$", name)
    return kind is not None or re.search(marks, content, re.IGNORECASE) is not None


def test_the_citation_names_the_version(root: Path, project: dict[str, Any]) -> None:
    assert f"\nversion: {project['project']['version']}\n" in (root / "CITATION.cff").read_text()


def _fresh_environment(folder: Path, package: Path, *how: str) -> tuple[Path, Path]:
    """Install `package` alone in a new environment, which borrows our dependencies; return its python and packages."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    [site] = (folder / "lib").glob("python3.*/site-packages")
    # .pth files in the folders named here are not read, so our own editable install is not found.
    borrowed = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", *how, str(package)], check=True, capture_output=True)
    return python, site


@pytest.mark.thorough
def test_type_checkers_follow_an_editable_install(source: Path, tmp_path: Path) -> None:
    """From a script elsewhere: mypy asks the interpreter for its path, and Pyright reads the paths in .pth files."""
    python, site = _fresh_environment(tmp_path / "fresh", source, "--no-build-isolation", "--editable")
    [pointer] = site.glob("__editable__*.pth")
    for name in FOLDERS:
        assert (Path(pointer.read_text().strip()) / "headrace" / name / "py.typed").exists(), pointer.read_text()
    (tmp_path / "script.py").write_text(
        "from headrace.schemas.settings.nearest_names import nearest_name\n"
        "from headrace import __version__\n"
        "reveal_type(nearest_name(__version__, [], cutoff=0.5))\n"
        "nearest_name(3)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "script.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert re.search(r'script.py:3: note: Revealed type is "(builtins\.)?str \| None"', checked), checked
    assert 'script.py:4: error: Argument 1 to "nearest_name" has incompatible type "int"' in checked
    assert "Found 2 errors" in checked, "the other one is the missing argument"


@pytest.mark.thorough
def test_the_wheel_runs_without_the_repository(wheel: Path, tmp_path: Path, project: dict[str, Any]) -> None:
    """In a fresh environment, from an empty folder. `.ci/run` runs a fleet there too."""
    python, site = _fresh_environment(tmp_path / "fresh", wheel)
    (tmp_path / "empty").mkdir()
    code = "import headrace.schemas.frames.wire as w, headrace.deploy as d; print(w.__file__); print(d.__file__)"
    found = subprocess.run([python, "-c", code], cwd=tmp_path / "empty", capture_output=True, text=True, check=True)
    assert all(line.startswith(str(site)) for line in found.stdout.split())
    command = tmp_path / "fresh" / "bin" / "headrace"
    for start in ([command], [python, "-m", "headrace"]):
        helped = subprocess.run([*start, "--help"], cwd=tmp_path / "empty", capture_output=True, text=True, check=True)
        assert "worker" in helped.stdout
        assert "broker" in helped.stdout
    code = "import headrace, sys; print(headrace.__version__); assert 'torch' not in sys.modules"
    found = subprocess.run([python, "-c", code], cwd=tmp_path / "empty", capture_output=True, text=True, check=True)
    assert found.stdout.strip() == project["project"]["version"]
