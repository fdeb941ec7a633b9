"""Side effects of forward, and which of them a trace can hold."""
