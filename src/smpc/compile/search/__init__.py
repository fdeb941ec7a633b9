"""The search for the fastest way to train a model within a memory limit."""

from smpc.compile.search.search_result import Result, Search, Verdict
from smpc.compile.search.searcher import search
from smpc.compile.search.space import Candidate

__all__ = ["Candidate", "Result", "Search", "Verdict", "search"]
