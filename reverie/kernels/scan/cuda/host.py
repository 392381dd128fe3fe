"""Host code shared by the two CUDA implementations of the posterior scan."""

from __future__ import annotations

import warnings
from importlib import resources

from reverie.kernels import nvrtc
from reverie.kernels.scan import cuda

SHARED_SOURCES = ("numbers.cu", "arguments.cu")


def read_sources(package: str, *names: str, constants: str = "") -> str:
    """Concatenate the shared CUDA files, constants, and the named files of `package`.

    NVRTC gets all pieces as one source, so the key of its cache covers them all.
    """
    shared, own = resources.files(cuda), resources.files(package)
    return "\n".join(
        [
            *(shared.joinpath(name).read_text() for name in SHARED_SOURCES),
            constants,
            *(own.joinpath(name).read_text() for name in names),
        ]
    )


class KernelErrors(list[str]):
    """Errors of the compiler and of launches. After the first, kernels are disabled."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def disable(self, error: nvrtc.Unavailable) -> None:
        """Record the error and warn that a slower implementation is used instead."""
        self.append(str(error))
        warnings.warn(
            f"The CUDA kernels of the {self.name} posterior scan cannot run: {error}\n"
            "  A slower implementation with the same results is used instead.",
            RuntimeWarning,
            stacklevel=3,
        )
