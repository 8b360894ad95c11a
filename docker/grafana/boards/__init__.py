"""The dashboards for Grafana, one per module. `parts` has the panels that they share."""
