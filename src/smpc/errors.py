"""Every error that smpc raises on purpose.

    SmpcError
    |-- ConfigError (ValueError)            a setting, a command-line argument or a config file is wrong
    |   |-- ConfigTypeError (TypeError)     ... because it has the wrong type
    |   `-- ConfigUnsupportedError (NotImplementedError)    ... because this version cannot do it yet
    |-- UsageError (ValueError)             a function is called too early or with wrong arguments
    |-- StepError (ValueError)              the arguments or the body of a step function are wrong
    |-- TraceError                          the model cannot be recorded
    |-- PartitionError (ValueError)         no plan exists, or the plan asked for is impossible
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


class TraceError(SmpcError):
    """A model cannot be recorded; names the source line, the module and a way out."""


class PartitionError(SmpcError, ValueError):
    """No plan satisfies what was asked."""


class CodegenError(SmpcError):
    """A plan cannot be turned into programs."""


class ScheduleError(CodegenError):
    """A schedule deadlocks, reads a value too early, or breaks its memory bound."""


class TransportError(SmpcError):
    """A message between ranks is missing, late or not as planned."""


class PeerError(TransportError):
    """Another rank failed first; the text carries that rank's traceback."""


class CheckpointError(SmpcError):
    """A checkpoint is missing, damaged or does not fit the model."""
