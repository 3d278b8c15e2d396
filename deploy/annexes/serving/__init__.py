"""`headrace serve`: a trained policy for clients."""
