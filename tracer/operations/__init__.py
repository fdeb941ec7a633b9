"""Operations that a fake run alone does not record right: values, sizes from data, missing kernels; and the cost of a call."""
