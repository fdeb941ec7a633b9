"""The schedules, one family a file; `smpc.codegen.schedules.named` finds them by name."""
