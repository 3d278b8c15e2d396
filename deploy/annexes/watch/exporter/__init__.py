"""`headrace exporter`: metrics for Prometheus, and the files for it and for Grafana."""
