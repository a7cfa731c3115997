"""`python -m flash_ext.testing.record check` for a Python without torch.

    python flash_ext/testing/check_record.py

The check reads files only, but importing the package imports torch. So a package without its
`__init__` stands in for it here, in which the modules that the check needs are found all the same.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

TESTING = Path(__file__).resolve().parent


def main() -> int:
    """Exit code of `flash_ext.testing.record`."""
    for name, folder in (("flash_ext", TESTING.parent), ("flash_ext.testing", TESTING)):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    code: int = importlib.import_module("flash_ext.testing.record").main(["check"])
    return code


if __name__ == "__main__":
    sys.exit(main())
