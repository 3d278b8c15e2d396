"""The state of a fleet, and its series, as page and `top` show them."""
