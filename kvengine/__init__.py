"""KV-cache management for long contexts, on any Hugging Face decoder model."""
