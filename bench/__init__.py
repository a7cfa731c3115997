"""Benchmarks of flash_ext beside its peers; run them from the repository root."""
