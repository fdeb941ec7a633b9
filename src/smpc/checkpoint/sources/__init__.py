"""Where tensors can be read from, one at a time, and full files written from any of them."""
