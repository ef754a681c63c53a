"""What a Prometheus and a Grafana need, rendered from Settings.

    alerts(settings, job, runbooks) -> Data     rules for a Prometheus: as a file of its own, or in a PrometheusRule
    dashboard(settings) -> Data                 a Grafana dashboard, in rows as the live page has them
    alerts_yaml, dashboard_json -> str          both as files

Names of metrics are those of the table that `tidegate metrics` prints; a test reads every query here and compares.
"""

from extproc.render.monitoring.alerts import JOB, RUNBOOKS, alerts, alerts_yaml
from extproc.render.monitoring.dashboard import dashboard, dashboard_json

__all__ = ["JOB", "RUNBOOKS", "alerts", "alerts_yaml", "dashboard", "dashboard_json"]
