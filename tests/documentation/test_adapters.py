"""The blocks of the page about other libraries that need a library which the other tests may lack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from documentation.blocks import blocks_of
from documentation.story import Story

PAGE = Path(__file__).parents[2] / "docs/guides/adapters.md"


@pytest.mark.slow
@pytest.mark.thorough
def test_torchrl_trains_from_a_fleet_as_the_page_shows(tmp_path: Path) -> None:
    pytest.importorskip("torchrl", reason="torchrl is not installed; pip install 'headrace[torchrl]'")
    fleet, plain, torchrl = (
        next(block for block in blocks_of(PAGE) if text in block.text)
        for text in ("headrace up", "DataLoader(", "TensorDictReplayBuffer(")
    )
    with Story(tmp_path, []) as story:
        for block in (fleet, plain, replace(torchrl, marks={"given": "update"})):
            story.run(block)
