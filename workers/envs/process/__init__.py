"""Envs in processes of their own: an env that hangs, crashes or leaks costs its own episode and never the worker.

`pool.py` is the driver's side and `child.py` the process. Columns pass through shared memory (`shared_arrays.py`).
Commands, and notes of what a process does, pass through `control.py`; bells and long replies through `channel.py`.
"""
