"""Live views and reports of a fleet: page, `top`, report, exporter."""
