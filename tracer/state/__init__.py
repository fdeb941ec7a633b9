"""The tensors that a model holds, while it is recorded: fakes in their places, aliases among them, generators."""
