"""Text to batches: files, corpora, mixtures, sequence packing, labels."""
