"""Benchmarks of statelog: ``python -m benchmarks --list`` names them, README.md says what they measure."""
