"""`LLM` and what it is put together from."""

from minikv.engine.llm import LLM

__all__ = ["LLM"]
