"""What scripts write into parameters and gradients between steps, where ranks have parts of them.

dtensor_writes    DTensors, as `fully_shard` makes them: torch's own writes, and what one process writes where torch has none
slice_parameters  slices of tensor- and expert-parallel ranks, empty ones among them: what one process writes, or an error
                  slice_values, slice_numbers     what scripts see of them, and compute of them
                  slice_provenance                what is known of a value: which rows it has, and of which it was computed
                  slice_sizes                     sizes that scripts read of them
                  script_collectives              what a script's collectives leave of that
                  undifferentiated                what is computed of them where gradients are recorded
                  write_operands, compare_writes  what else was used for a write, and what ranks compare of writes
data_aliases      writes through `parameter.data`, which torch does not count
callers           whose code calls
between_steps     parameters of their own classes between steps, ordinary ones in them
uncompiled        functions of torch.compile that a script calls with them
"""
