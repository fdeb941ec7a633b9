"""The effects of `tsm.transform` on a model: slices of its weights, slices of its sequences, some of its experts."""
