"""The folder of a run: what appears in it is whole, and two savers do not meet in it."""
