"""What a model asks of the process, and what it does besides: settings, clocks, files, locks, caches, functions of torch, generators."""
