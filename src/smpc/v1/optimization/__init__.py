"""`smp.DistributedOptimizer`: precision, masters, loss scaling, and optimizer state sharded over the replicas."""
