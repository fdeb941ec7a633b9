"""Triton kernels; they import no other part of smpc."""

if not __name__.startswith("smpc."):
    # transformers asks any package `kernels` on the path for its version: from the root of the repository, this one.
    __version__ = "0"
    __path__ = []

    def __getattr__(name: str) -> object:
        raise ImportError(
            f"import smpc.kernels, not {__name__}: the folders at the top of the repository are parts of smpc"
        )
