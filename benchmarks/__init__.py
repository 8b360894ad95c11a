"""Benchmarks that you can repeat: `make bench`, `make chaos`, `make bench-wan` and others."""
