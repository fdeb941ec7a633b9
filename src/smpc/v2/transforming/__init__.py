"""What `tsm.transform` makes of a model: slices of its weights, slices of its sequences, some of its experts."""
