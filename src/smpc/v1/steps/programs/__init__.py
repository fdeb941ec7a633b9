"""Which program a step runs: the signature of its inputs, the existing programs, and how the ranks make a new one."""
