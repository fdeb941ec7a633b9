"""Triton kernels; they import no other part of smpc."""

if not __name__.startswith("smpc."):
    raise ImportError(
        f"import smpc.kernels, not {__name__}: the folders at the top of the repository are parts of smpc"
    )
