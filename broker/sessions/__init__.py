"""The broker's state machine: sessions with workers and learners, claims, leases and acknowledgements."""
