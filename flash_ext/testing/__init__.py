"""What the tests and benchmarks share, for users too: cases, tolerances, timing.

Imported with the package: `forced`. The rest is imported by module.
"""

from flash_ext.testing.forced import forced

__all__ = ["forced"]
