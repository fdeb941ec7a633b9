"""Modules for model-parallel training: tensor-parallel layers, flash attention, fused norms. `smpc.v1` offers them as `smp.nn`."""
