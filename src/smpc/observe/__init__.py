"""Observing the steps of a job: which steps, which records, which callbacks."""
