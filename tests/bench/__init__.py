"""Measurements, side by side with what limits them."""
