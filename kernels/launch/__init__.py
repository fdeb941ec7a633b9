"""How a Triton program is compiled and started, and in which variant."""
