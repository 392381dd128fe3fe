"""Host code shared by the two CUDA implementations of the posterior scan."""

from __future__ import annotations

from importlib import resources

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
