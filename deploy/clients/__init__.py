"""Sample clients of a policy server, each a program by itself.

`http_client.py`, `http_client.mjs` and `http_client.c` speak HTTP with nothing but what their language brings along;
`cartpole.py` is a simulator, for either way in.
"""
