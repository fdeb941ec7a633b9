"""Which program a step runs: the signature of its inputs, the programs there are, and how the ranks come to a new one."""
