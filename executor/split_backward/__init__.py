"""A backward in two parts: gradients of inputs at once, gradients of parameters later."""
