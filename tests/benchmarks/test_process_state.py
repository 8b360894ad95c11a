"""Reading a process's metrics."""

from __future__ import annotations

from benchmarks.process_state import Metrics

TEXT = """
# TYPE sent_bytes counter
sent_bytes_total{kind="update",region="eu"} 3.0
sent_bytes_total{kind="update",region="us"} 4.0
sent_bytes_total{kind="whole",region="eu"} 50.0
# TYPE sent_bytes_limit gauge
sent_bytes_limit 600.0
"""


def test_a_total_sums_the_samples_with_the_name_and_labels():
    read = Metrics(TEXT)
    assert read.total("sent_bytes_total") == 57
    assert read.total("sent_bytes_total", kind="update") == 7
    assert read.total("sent_bytes_total", kind="update", region="us") == 4
    assert read.total("sent_bytes_limit") == 600
    assert read.total("sent_bytes_total", kind="fixed") == 0
    assert [each.labels["region"] for each in read.samples("sent_bytes_total", kind="update")] == ["eu", "us"]
