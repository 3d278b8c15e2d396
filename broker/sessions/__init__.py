"""The broker's state machine: sessions with workers and learners, leases and acknowledgements."""
