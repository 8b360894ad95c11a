"""Benchmarks that anyone can repeat: `make bench`, `make chaos`, `make bench-wan` and others."""
