"""What a script declares before its model is cut: partitions, recomputation, how the model is created."""
