"""A policy server: clients elsewhere drive episodes, and the newest policy answers.

`sessions.py` is what is promised to them, without any I/O; `desk.py` is the thread that keeps it; the ways in are
ZeroMQ (`frames.py`) and HTTP (`http_way.py`). The client in Python is `headrace.workers.policy_client`.
"""
