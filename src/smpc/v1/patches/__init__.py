"""Where scripts import the checkpoint functions from: `from ...patches.checkpoint import checkpoint`."""

from smpc.v1.patches import checkpoint

__all__ = ["checkpoint"]
