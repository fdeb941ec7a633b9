"""Attention split over tensor-parallel ranks, and the attention modules of SMP v1 and v2."""
