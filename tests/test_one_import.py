"""`from headrace import NAME`: each name that a user needs, loaded when it is first used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

import headrace

ROOT = Path(__file__).parents[1]


def test_each_name_is_the_one_of_its_own_package() -> None:
    for name in headrace._HOMES:
        assert getattr(headrace, name).__module__.startswith("headrace."), name
    assert headrace.__version__ == headrace.workers.__version__


def test_editors_see_the_names_that_are_loaded() -> None:
    tree = ast.parse(Path(headrace.__file__).read_text())
    typed = [one for one in tree.body if isinstance(one, ast.If)]
    homes = {each.names[0].name: str(each.module) for each in typed[0].body if isinstance(each, ast.ImportFrom)}
    assert homes == headrace._HOMES


def test_every_class_and_function_of_the_api_page_is_there() -> None:
    page = (ROOT / "docs/reference/python-api.md").read_text()
    users = page.partition("## Deployment")[0]
    named = {name.rpartition(".")[2] for name in re.findall(r"\.\. auto(?:class|function):: (\S+)", users)}
    elsewhere = {"SB3VecEnv", "EpisodeDataset", "updates", "to_episodes"}  # adapters, by the library that they need
    shown = {"Episodes", "Transitions", "TimeMajor", "EpisodeChunk", "ChunkEnd", "to_episode", "Lookback", "ChunkBatch"}
    spaces = {"Spaces", "Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple"}
    own = {"Logger", "RunInfo"}
    assert named - elsewhere - shown - spaces - own <= headrace._HOMES.keys()


def test_a_star_import_leaves_the_name_that_gymnasium_has_too() -> None:
    names: dict[str, object] = {}
    exec("from gymnasium.vector import *\nfrom headrace import *", names)  # noqa: S102
    assert names["VectorEnv"] is gymnasium.vector.VectorEnv
    assert names["EpisodeStream"] is headrace.EpisodeStream
    assert headrace.VectorEnv is not gymnasium.vector.VectorEnv
    assert "VectorEnv" in dir(headrace)


def test_importing_the_package_loads_nothing_else() -> None:
    script = "import sys; before = set(sys.modules); import headrace; print(*sorted(set(sys.modules) - before))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["headrace"]


def test_a_stream_is_loaded_without_torch_and_gymnasium() -> None:
    script = "import sys; from headrace import EpisodeStream; print('torch' in sys.modules, 'gymnasium' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "False"]


def test_a_misspelt_name_is_told_the_nearest() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import headrace; headrace.EpisodeStrem"], capture_output=True, text=True, check=False
    )
    assert "Did you mean: 'EpisodeStream'?" in told.stderr
    with pytest.raises(ImportError, match="EpisodeStrem"):
        exec("from headrace import EpisodeStrem")  # noqa: S102


def test_the_versions_page_has_one_label_for_each_name() -> None:
    page = (ROOT / "docs/reference/versions.md").read_text()
    rows = re.findall(r"^\| (?:stable|beta|alpha) \| (`.*) \|$", page, re.MULTILINE)
    assert len(rows) == 3
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(headrace._HOMES)
