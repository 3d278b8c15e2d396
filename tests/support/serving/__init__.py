"""Policy servers, and clients of them."""
