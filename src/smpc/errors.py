"""Every error that smpc raises on purpose.

    SmpcError
    |-- ConfigError (ValueError)            a setting, a command-line argument or a config file is wrong
    |   |-- ConfigTypeError (TypeError)     ... because it has the wrong type
    |   `-- ConfigUnsupportedError (NotImplementedError)    ... because this version cannot do it yet
    |-- UsageError (ValueError)             a function is called too early or with wrong arguments
    |-- StepError (ValueError)              the arguments or the body of a step function are wrong
    |   `-- NonFiniteLossError              ... or its loss is NaN or infinite
    |-- TraceError                          the model cannot be recorded
    |-- PartitionError (ValueError)         no plan exists, or the plan asked for is impossible
    |   `-- MemoryLimitError                ... because every plan that was found exceeds the memory limit
    |-- CodegenError                        a plan cannot be turned into programs
    |   `-- ScheduleError                   a schedule deadlocks, or reads a value before it exists
    |-- TransportError                      a message between ranks is missing, late or not as planned
    |   `-- PeerError                       another rank failed first; carries that rank's traceback
    `-- CheckpointError                     a checkpoint is missing, damaged or does not fit the model

A message says what was expected, what was found, where (module, rank, microbatch) and what to do.
All violations of one input are reported together, one line each.
"""

from __future__ import annotations


class SmpcError(Exception):
    """Root of the tree."""


class ConfigError(SmpcError, ValueError):
    """A setting is unknown, out of bounds or contradicts another."""


class ConfigTypeError(ConfigError, TypeError):
    """A setting has the wrong type."""


class ConfigUnsupportedError(ConfigError, NotImplementedError):
    """A setting is valid, but asks for something that this version cannot do."""


class UsageError(SmpcError, ValueError):
    """A function of the programming interface is called too early, or with arguments that cannot be."""


class StepError(SmpcError, ValueError):
    """A step function got arguments, or did something, that a pipeline cannot run."""


class NonFiniteLossError(StepError):
    """The loss of a microbatch is NaN or infinite, on some rank; raised on all of them after the step, which changes nothing."""


class TraceError(SmpcError):
    """A model cannot be recorded; names the source line, the module and a way out."""


class PartitionError(SmpcError, ValueError):
    """No plan satisfies what was asked."""


class MemoryLimitError(PartitionError):
    """No plan within the memory limit. `least_bytes` is the smallest limit that would do."""

    def __init__(self, text: str, least_bytes: int = 0) -> None:
        super().__init__(text)
        self.least_bytes = least_bytes


class CodegenError(SmpcError):
    """A plan cannot be turned into programs."""


class ScheduleError(CodegenError):
    """A schedule deadlocks, reads a value too early, or breaks its memory bound."""


class TransportError(SmpcError):
    """A message between ranks is missing, late or not as planned."""


class PeerError(TransportError):
    """Another rank failed first, and the text carries its traceback; or it ended before the others met."""


class CheckpointError(SmpcError):
    """A checkpoint is missing, damaged or does not fit the model."""
