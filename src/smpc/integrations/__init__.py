"""Pipelines for libraries that have a training loop of their own; each module needs its library, and is imported by its name.

smpc.integrations.accelerate      PipelineAccelerator: accelerate's, where several ranks are one replica
smpc.integrations.huggingface     PipelineTrainer: the Trainer of transformers
smpc.integrations.lightning       PipelineStrategy: a Strategy for Lightning's Trainer
"""
