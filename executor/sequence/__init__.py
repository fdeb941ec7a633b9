"""What ranks do that each have a slice of a sequence: attention, and means over all of it."""
