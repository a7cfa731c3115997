"""What a test or a measurement ran on."""

from __future__ import annotations

import subprocess


def driver_version() -> str:
    """Version of the NVIDIA driver, as nvidia-smi gives it; "unknown" if it does not."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        return answer.stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return "unknown"
