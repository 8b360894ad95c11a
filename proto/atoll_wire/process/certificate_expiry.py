"""Exports the expiry times of a process's certificates to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from cryptography import x509
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll_wire.security.transport import AUTHORITY, CERTIFICATE, TransportSecurity, TransportSecurityError


def expiry_times(security: TransportSecurity) -> dict[str, float]:
    """Returns the Unix time at which each certificate file in use expires. The result is empty for plain text.

    A bundle of authorities expires with its last authority. Raises TransportSecurityError if no files can be used.
    """
    files = security.files()
    if files is None:
        return {}
    return {
        CERTIFICATE: _expires(x509.load_pem_x509_certificate(files.certificate)),
        AUTHORITY: max(map(_expires, x509.load_pem_x509_certificates(files.authority))),
    }


def _expires(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


class CertificateExpiry(Collector):
    """Exports one gauge per certificate file, without process labels. times: function that returns times by file."""

    def __init__(self, times: Callable[[], Mapping[str, float]]) -> None:
        self._times = times

    def collect(self) -> Iterator[Metric]:
        """Yields the gauge. Prometheus calls this at each scrape, so renewed certificates count at once."""
        gauge = GaugeMetricFamily(
            "atoll_certificate_expiry_timestamp_seconds",
            "Time at which a certificate in use expires, by file: cert.pem or ca.pem; absent without TLS",
            labels=["file"],
        )
        try:
            times = self._times()
        except TransportSecurityError:
            return  # a process that never had usable files reports this error itself, and other metrics are unaffected
        for file, time in times.items():
            gauge.add_metric([file], time)
        yield gauge
