"""A load generator for OpenAI-compatible servers, and the loads that it sends."""
