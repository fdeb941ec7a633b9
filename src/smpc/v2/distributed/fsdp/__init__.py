"""Names that scripts for SMP v2 import for FSDP."""
