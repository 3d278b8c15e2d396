"""Envs on other hosts, which `headrace env-host` starts and which may come and go: the worker's side.

`pool.py` is the backend of a vector, `peer.py` the record of one host, `router_port.py` the port for hosts.
"""
