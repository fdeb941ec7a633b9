"""What of the model is on which rank: parameters, buffers, slices of tensors."""
