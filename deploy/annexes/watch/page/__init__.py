"""`headrace dashboard`: the live page of a fleet."""
