"""The search for the fastest way to train a model within a memory limit."""

from smpc.auto.found import Result, Search, Verdict
from smpc.auto.search import search
from smpc.auto.space import Candidate

__all__ = ["Candidate", "Result", "Search", "Verdict", "search"]
