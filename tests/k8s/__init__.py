"""Tests of the Helm chart and the overlays."""
