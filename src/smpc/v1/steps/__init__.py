"""Step functions of the SMP v1 API: splitting their arguments, running them over a pipeline, joining their results."""
