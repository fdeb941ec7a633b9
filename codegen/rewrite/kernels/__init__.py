"""Rewrites that replace what a model computes by the ops of `smpc.kernels`."""

from smpc.codegen.rewrite.kernels.rewrite import REWRITES, Rewritten, rewrite_kernels, select_rewrites

__all__ = ["REWRITES", "Rewritten", "rewrite_kernels", "select_rewrites"]
