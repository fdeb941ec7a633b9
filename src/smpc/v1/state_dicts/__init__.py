"""State dicts of a model that is on several ranks."""
