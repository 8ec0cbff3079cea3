"""Bodies of calls, in the form of OpenAI's API, with vLLM's names for what it lacks."""
