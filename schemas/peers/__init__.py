"""The means by which processes find each other: addresses, the broker's published file, handshakes, ports."""
