"""The cost of a node on a device: times and bytes of state, predicted or measured."""
