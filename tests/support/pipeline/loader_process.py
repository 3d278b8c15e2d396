"""A learner with a `DataLoader` over a `StreamDataset`, as a process. It writes a line of JSON for each item.

python -m support.pipeline.loader_process RUN_DIR FILE OPTIONS

OPTIONS is JSON: what `DataLoader` takes, and `hold`: the item of the first loop at which the process waits for a file
FILE.go. A second loop follows the first, which it breaks there with persistent workers: over the same loader then,
else over a new one.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from torch.utils.data import DataLoader

from headrace import StreamDataset, WeightPublisher
from support.pipeline.rank_process import told
from support.waiting import TIMEOUT_S

_TRAINING_S = 0.02
_IDLE_S = 2.0


def main(run_dir: str, file: str, given: str) -> None:
    faulthandler.dump_traceback_later(0.75 * TIMEOUT_S)  # so that a test which waits in vain shows where it hangs
    options = orjson.loads(given)
    hold = options.pop("hold")
    dataset = StreamDataset(run_dir, convert=told, batch_timeout_s=_IDLE_S)
    with WeightPublisher.of(run_dir) as weights, Path(file).open("ab") as out:

        def say(**content: Any) -> None:
            out.write(orjson.dumps(content) + b"\n")
            out.flush()

        loader = DataLoader(dataset, batch_size=None, **options)
        for loop in range(2):
            if not loader.persistent_workers:
                loader = DataLoader(dataset, batch_size=None, **options)
            try:
                for number, item in enumerate(loader, 1):
                    say(loop=loop, item=item)
                    weights.publish({"w": np.full(1, number, np.float32)})
                    time.sleep(_TRAINING_S)
                    if not loop and number == hold:
                        say(held=[child.pid for child in multiprocessing.active_children()])
                        while not Path(f"{file}.go").exists():
                            time.sleep(0.02)
                        if loader.persistent_workers:
                            break
            except RuntimeError as error:
                say(error=str(error))
        while weights.acknowledged[1] < weights.seq:
            weights.pump(0.05)
        say(published=weights.seq)


if __name__ == "__main__":
    main(*sys.argv[1:])
