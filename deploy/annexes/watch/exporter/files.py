"""Files for Prometheus and Grafana that come with the package."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

DEFAULT_LISTEN = "127.0.0.1:9747"
"""Address of `headrace exporter`; the scrape config names it too."""

_DEPLOY = Path(__file__).parents[3]


class MonitoringFile(StrEnum):
    """A file for Prometheus or Grafana."""

    SCRAPE_CONFIG = "scrape-config"
    ALERT_RULES = "alert-rules"
    GRAFANA_DASHBOARD = "grafana-dashboard"

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return _DEPLOY / _PLACES[self]

    def text(self) -> str:
        """Return the text of the file."""
        return self.path.read_text(encoding="utf-8")


_PLACES = {
    MonitoringFile.SCRAPE_CONFIG: "prometheus/prometheus.yml",
    MonitoringFile.ALERT_RULES: "prometheus/headrace-rules.yml",
    MonitoringFile.GRAFANA_DASHBOARD: "grafana/headrace.json",
}
