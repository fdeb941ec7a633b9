"""What a node costs on a device: times, bytes of state, and both measured."""
