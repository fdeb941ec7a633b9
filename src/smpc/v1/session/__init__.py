"""A session of the SMP v1 API: starting and ending it, ranks and groups, messages between ranks."""
