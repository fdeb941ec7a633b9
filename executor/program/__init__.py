"""Runs the program of one rank: instructions bound once, the interpreter that walks them, and what is in flight."""
