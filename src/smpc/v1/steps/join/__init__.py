"""`DistributedModel.join`: replicas that run out of data, by what the replicas hold."""
