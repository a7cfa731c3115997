"""Exact attention for PyTorch without the table of scores in memory."""

from flash_ext import classic, testing
from flash_ext.attention_map import attention_map
from flash_ext.build import __version__, build_info
from flash_ext.dispatch import Plan
from flash_ext.interface import attention, explain
from flash_ext.merge import merge
from flash_ext.varlen import attention_varlen

__all__ = [
    "Plan",
    "__version__",
    "attention",
    "attention_map",
    "attention_varlen",
    "build_info",
    "classic",
    "explain",
    "merge",
    "testing",
]
