"""The page on notebooks, run by a Jupyter kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from documentation.blocks import blocks_of

PAGE = Path(__file__).parents[2] / "docs/guides/notebook.md"
OWN_ENV = """\
import gymnasium as gym

class Cart(gym.Wrapper):
    def __init__(self, context=None):
        super().__init__(gym.make("CartPole-v1"))
"""


def run(folder: Path, *cells: str) -> list[Any]:
    """Return the outputs of each cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell["outputs"] for cell in notebook.cells]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_cells_of_the_page_run_as_a_notebook(tmp_path: Path) -> None:
    cells = [block.text for block in blocks_of(PAGE) if block.is_run]
    outputs = run(tmp_path, "train = lambda module, batch: None", *cells, "len(returns)")
    assert "committed" in outputs[-2][-1]["data"]["text/plain"]
    assert int(outputs[-1][-1]["data"]["text/plain"]) > 10


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_env_of_a_cell_is_refused_and_one_that_the_cell_writes_to_a_file_is_taken(tmp_path: Path) -> None:
    with pytest.raises(nbclient.exceptions.CellExecutionError, match=r"%%writefile my_code\.py"):
        run(tmp_path, OWN_ENV, "import headrace; headrace.fleet(Cart)")
    use = "import headrace\nfrom my_envs import Cart\nwith headrace.fleet(Cart) as run: pass\nrun.summary['balanced']"
    written, used = run(tmp_path, f"%%writefile my_envs.py\n{OWN_ENV}", use)
    assert written
    assert used[-1]["data"]["text/plain"] == "True", used
