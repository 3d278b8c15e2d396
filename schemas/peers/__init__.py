"""How processes find and meet each other: addresses, the broker's published file, handshakes, ports."""
