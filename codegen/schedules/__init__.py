"""The named schedules, one family a file; `smpc.codegen.schedule` finds them by name."""
