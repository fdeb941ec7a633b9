"""What forward does besides computing, and which of it a trace can hold."""
