"""A load generator for OpenAI-compatible servers, and its workloads."""
