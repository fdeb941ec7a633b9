"""What forwards write into whole parameters, where ranks hold parts of them or have samples of their own.

writes       kept in the parts: rows that lookups scale down, and what else is written
row_norms    which rows lookups have scaled down
"""
