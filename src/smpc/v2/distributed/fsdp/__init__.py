"""What scripts for SMP v2 import for FSDP."""
