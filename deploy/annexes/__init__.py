"""Parts that a fleet can do without. Each annex registers its commands and parts in `deploy/run/annexes.py`."""
