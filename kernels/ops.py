"""Importing this module registers every op `torch.ops.smpc.*`: what a process needs that runs a recorded graph by name."""

from smpc.kernels import activations as activations
from smpc.kernels import attention as attention
from smpc.kernels import bias_dropout_add as bias_dropout_add
from smpc.kernels import cross_entropy as cross_entropy
from smpc.kernels import layer_norm as layer_norm
from smpc.kernels import linear_cross_entropy as linear_cross_entropy
from smpc.kernels import rms_norm as rms_norm
from smpc.kernels import rotary as rotary
from smpc.kernels import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
