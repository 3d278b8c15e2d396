"""The broker's sockets, and what peers may do at them."""
