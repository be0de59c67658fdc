"""GGUF files of the llama architecture, converted to Hugging Face folders in bfloat16."""

from ddtree.models.gguf.conversion import convert

__all__ = ["convert"]
