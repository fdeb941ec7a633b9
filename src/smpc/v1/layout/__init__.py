"""Which rank holds which parts of the model: parameters, buffers, slices of tensors."""
