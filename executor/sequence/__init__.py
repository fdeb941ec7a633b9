"""Operations of ranks that each have a slice of a sequence: attention, and means over the whole sequence."""
