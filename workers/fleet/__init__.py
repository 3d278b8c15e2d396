"""The worker process: it joins a fleet, samples with the newest weights and ships what it sampled."""
