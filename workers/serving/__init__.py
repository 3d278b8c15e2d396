"""A policy server: clients elsewhere drive episodes, and the newest policy chooses the actions.

| file | content |
|---|---|
| `served_env.py`, `standalone.py` | a worker's policy server, and one without a fleet |
| `dispatcher.py` | carries requests to the sessions and answers back, in the sampler's thread |
| `client_sessions.py`, `session_episodes.py`, `session_records.py` | what clients are promised |
| `acting_channel.py` | the same for clients that act by themselves |
| `space_codec.py`, `episode_codec.py` | observations and actions as JSON and as arrays |
| `zmq/`, `http/` | how requests arrive |
| `client/` | the client in Python, `headrace.workers.serving.client.PolicyClient` |
| `acting/` | the client that acts by itself, `headrace.workers.serving.acting.ActingClient` |

`protocol.md` describes the messages.
"""
