"""The policy server's HTTP side."""
