"""A policy server: clients elsewhere drive episodes, and the newest policy answers.

`sessions.py` is what is promised to them, without any I/O, to those that act by themselves in `acting_clients.py`;
`desk.py` brings it requests and answers, in the sampler's own thread; the ways in are ZeroMQ (`zmq/frames.py`) and HTTP
(`http/server.py`). Of several agents the same goes by dicts (`agent_values.py`, `agents_table.py`). The
client in Python is `headrace.workers.serving.client`, and `headrace.workers.serving.acting` has the one that acts by
itself.
"""
