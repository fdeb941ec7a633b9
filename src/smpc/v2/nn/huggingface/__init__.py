"""Attention of Hugging Face's models."""
