"""Layers split over tensor-parallel ranks, and fused norms and losses."""
