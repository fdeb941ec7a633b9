"""Keys of values that scripts save beside state dicts. Source: public training scripts for SMP v2."""

__all__ = ["SMP_IS_LOAD_INFO_KEY", "SMP_IS_PARTIAL_KEY"]
SMP_IS_PARTIAL_KEY = "smp_is_partial"
SMP_IS_LOAD_INFO_KEY = "smp_is_load_info"
