"""The values that a recording read besides its inputs: noted, kept as guards, and compared before every step."""
