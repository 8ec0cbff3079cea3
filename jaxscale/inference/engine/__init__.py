"""The continuous-batching engine: scheduler, paged KV cache, compiled programs."""
