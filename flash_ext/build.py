"""The compiled extension: loading it, and what it was built from.

The package works without it: CPU tensors need none. What is missing, and how to get it, is kept as
a sentence for whoever asks for a CUDA kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType

__version__ = "0.1.0"

REBUILD = (
    "Install with nvcc at hand (FLASH_EXT_NVCC, CUDA_HOME or PATH) and without "
    "FLASH_EXT_CUDA_ARCHS=none: `pip install --force-reinstall --no-deps .`, or "
    "`python setup.py build_ext --inplace` in a source tree."
)


@dataclass(frozen=True)
class BuildInfo:
    """What the package was built from.

    Attributes:
        version: version of the package.
        archs: compiled architectures as asked for, such as `("80", "90a", "80+PTX")`; empty when
            only the CPU path is installed.
        nvcc: version of the CUDA compiler, or None without compiled kernels.
        flags: compiler flags of the kernels.
        head_dims: head dims with compiled kernels.
        digests: digest of the sources of each kernel family, of the host code around them
            (`"binding"`) and of all of `csrc` (`"csrc"`).
    """

    version: str = __version__
    archs: tuple[str, ...] = ()
    nvcc: str | None = None
    flags: str = ""
    head_dims: tuple[int, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)


@lru_cache(maxsize=1)
def _load() -> tuple[ModuleType | None, str]:
    """The extension, or None and the reason."""
    name = f"{__package__}._C"
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None, f"flash_ext {__version__} is installed without compiled kernels. {REBUILD}"
    try:
        module = importlib.import_module(name)
        built = module.build_info()["version"]
    except Exception as error:
        return None, f"The compiled extension {spec.origin} does not load: {error}. {REBUILD}"
    if built != __version__:
        return None, (
            f"The compiled extension {spec.origin} is of version {built}, the Python sources are "
            f"of version {__version__}. {REBUILD}"
        )
    return module, ""


def extension() -> ModuleType | None:
    """The compiled extension, or None where there is none that can be used."""
    return _load()[0]


def missing_reason() -> str:
    """Why `extension()` is None and how to change that; empty when it is there."""
    return _load()[1]


def build_info() -> BuildInfo:
    """Version, compiled architectures, compiler and source digests of the installed package."""
    module = extension()
    if module is None:
        return BuildInfo()
    facts = module.build_info()
    return BuildInfo(
        version=facts["version"],
        archs=tuple(facts["archs"]),
        nvcc=facts["nvcc"],
        flags=facts["flags"],
        head_dims=tuple(facts["head_dims"]),
        digests=dict(facts["digests"]),
    )
