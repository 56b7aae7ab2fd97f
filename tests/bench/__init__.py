"""Measurements, run as ``python -m tests.bench.NAME``; no test of these is collected by pytest."""
