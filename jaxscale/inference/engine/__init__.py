"""The engine of continuous batching: scheduler, paged KV cache, compiled programs."""
