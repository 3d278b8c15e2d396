"""Envs in processes of their own: one that hangs, crashes or leaks costs its own episode and never the worker.

`pool.py` is the driver's side, `child.py` the process. What is large passes through shared memory (`shared.py`),
commands and notes of what a process does through `control.py`, bells and answers through `channel.py`.
"""
