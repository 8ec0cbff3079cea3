"""The policy of continuous batching: queue, pages, rows; no arrays."""
