"""The continuous-batching engine: scheduler, pages of keys and values, device programs."""
