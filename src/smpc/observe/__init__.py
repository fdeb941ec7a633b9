"""Watching the steps of a job: which ones, what is kept of them, who is told."""
