"""`smp.DistributedOptimizer`: masters, loss scaling, clipping, and optimizer state sharded over the replicas."""
