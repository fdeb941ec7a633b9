"""Recorded steps beside predictions: as a table, as the parts of the bubble, as a trace."""

from smpc.report.measured.comparison import Bubble, Comparison, Line, MeasuredMessages, compare, explain, whole_steps
from smpc.report.measured.steps import Message, PipelineStep, messages_of, pipeline_steps
from smpc.report.measured.trace import measured_json

__all__ = [
    "Bubble",
    "Comparison",
    "Line",
    "MeasuredMessages",
    "Message",
    "PipelineStep",
    "compare",
    "explain",
    "measured_json",
    "messages_of",
    "pipeline_steps",
    "whole_steps",
]
