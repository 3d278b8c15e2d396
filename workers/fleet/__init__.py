"""The worker process: it joins a fleet, samples with the newest weights and ships its chunks."""
