"""The module path from which scripts import the checkpoint functions: `from ...patches.checkpoint import checkpoint`."""

from smpc.v1.patches import checkpoint

__all__ = ["checkpoint"]
