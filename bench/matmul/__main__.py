"""`python -m bench.matmul`."""

import sys

from bench.matmul import main

sys.exit(main())
