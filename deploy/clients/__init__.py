"""Sample clients of a policy server, each a program by itself: `http_client.py`, `http_client.mjs`, `http_client.c`."""
