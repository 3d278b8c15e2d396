"""A policy server: clients elsewhere drive episodes, and the newest policy answers.

`sessions.py` is what is promised to them, without any I/O; `desk.py` is the thread that keeps it; `ways in` are
ZeroMQ (`door.py`) and HTTP (`http.py`). The client in Python is `headrace.workers.policy_client`.
"""
