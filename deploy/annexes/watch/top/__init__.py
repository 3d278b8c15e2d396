"""`headrace top`: a fleet in a terminal."""
