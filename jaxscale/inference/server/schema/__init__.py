"""Request bodies in OpenAI's format, with vLLM's names for what that lacks."""
