"""Model definitions that training and inference share. They know nothing of ranks or shards."""

from .gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
