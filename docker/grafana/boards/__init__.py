"""The dashboards for Grafana, one per module. Module `parts` has the panels that all dashboards share."""
