"""Every error that smpc raises on purpose.

    SmpcError
    |-- ConfigError (ValueError)            a setting, a command-line argument or a config file is wrong
    |   |-- ConfigTypeError (TypeError)     ... because it has the wrong type
    |   `-- ConfigUnsupportedError (NotImplementedError)    ... because this version cannot do it yet
    |-- UsageError (ValueError)             a function is called too early or with wrong arguments
    |   |-- NonFiniteNormError (RuntimeError)    ... or gradients to clip are not finite, and `error_if_nonfinite` is set
    |   `-- GroupError (RuntimeError)       ... or process groups are missing, or they differ from the launcher's ranks
    |       `-- MissingEnvironmentError     ... because a variable of the launcher is missing
    |-- StepError (ValueError)              the arguments or the body of a step function are wrong
    |   `-- NonFiniteLossError              ... or its loss is NaN or infinite
    |-- TraceError                          the model cannot be recorded
    |-- PartitionError (ValueError)         no plan exists, or the plan asked for is impossible
    |   `-- MemoryLimitError                ... because every plan that was found exceeds the memory limit
    |-- CodegenError                        a plan cannot be turned into programs
    |   `-- ScheduleError                   a schedule deadlocks, or reads a value before it exists
    |-- VerificationError                   compiled programs and the model give different results
    |-- TransportError                      a message between ranks is missing, late or not as planned
    |   `-- PeerError                       another rank failed first; carries that rank's traceback
    |       `-- PeerMemoryError             ... because it ran out of memory; all ranks may go on with less
    `-- CheckpointError                     a checkpoint is missing, damaged or does not fit the model
        `-- MissingKeyError (KeyError)      ... because it lacks a value that is to be loaded

A message says what was expected, what was found, where (module, rank, microbatch) and what to do.
All violations of one input are reported together, one line each.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with control characters and the like as escapes, so that it cannot steer a terminal or add a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


class SmpcError(Exception):
    """Root of the tree."""


class ConfigError(SmpcError, ValueError):
    """A setting is unknown, out of bounds or contradicts another."""


class ConfigTypeError(ConfigError, TypeError):
    """A setting has the wrong type."""


class ConfigUnsupportedError(ConfigError, NotImplementedError):
    """A setting is valid, but asks for something that this version cannot do."""


class UsageError(SmpcError, ValueError):
    """A function of the programming interface is called too early, or with wrong arguments."""


class NonFiniteNormError(UsageError, RuntimeError):
    """The norm of the gradients is NaN or infinite, and `error_if_nonfinite` is set; torch raises RuntimeError."""


class GroupError(UsageError, RuntimeError):
    """A function of `smpc.dist` needs process groups that do not exist, or that contradict the launcher."""


class MissingEnvironmentError(GroupError):
    """A variable of the launcher is missing, such as LOCAL_RANK."""


class StepError(SmpcError, ValueError):
    """A step function got arguments, or did something, that a pipeline cannot run."""


class NonFiniteLossError(StepError):
    """The loss of a microbatch is NaN or infinite, on some rank; raised on all of them after the step, which changes nothing."""


class TraceError(SmpcError):
    """A model cannot be recorded; names the source line, the module and a way out."""


class PartitionError(SmpcError, ValueError):
    """No plan satisfies the request."""


class MemoryLimitError(PartitionError):
    """No plan within the memory limit. `least_bytes` is the smallest sufficient limit, or the smallest known if not `is_least`."""

    def __init__(self, text: str, least_bytes: int = 0, *, is_least: bool = True) -> None:
        super().__init__(text)
        self.least_bytes = least_bytes
        self.is_least = is_least


class CodegenError(SmpcError):
    """A plan cannot be turned into programs."""


class ScheduleError(CodegenError):
    """A schedule deadlocks, reads a value too early, or breaks its memory bound."""


class VerificationError(SmpcError):
    """Compiled programs return or leave other values than the model itself; names the first module that differs."""


class TransportError(SmpcError):
    """A message between ranks is missing, late or not as planned."""


class PeerError(TransportError):
    """Another rank failed first, and the text carries its traceback; or it ended before it met the others."""


class PeerMemoryError(PeerError):
    """Another rank has run out of memory, and reported it before this rank began a collective that it would never join."""


class CheckpointError(SmpcError):
    """A checkpoint is missing, damaged or does not fit the model. Names in the text may come from files: control characters are escaped."""

    def __init__(self, text: str = "") -> None:
        super().__init__("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text))


class MissingKeyError(CheckpointError, KeyError):
    """A checkpoint lacks a value that is to be loaded."""

    __str__ = Exception.__str__  # KeyError shows its text in quotes
