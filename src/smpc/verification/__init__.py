"""Compiled programs beside the model itself: one microbatch runs through both, and everything that they give and leave is compared."""

from smpc.verification.check_programs import Verified, verify_compilation
from smpc.verification.paired_runs import Conditions

__all__ = ["Conditions", "Verified", "verify_compilation"]
