"""Sample clients of a policy server, each a program by itself.

`http_client.py`, `http_client.mjs` and `http_client.c` speak HTTP with only their language's standard library;
`cartpole.py` is a simulator that speaks ZeroMQ or HTTP.
"""
