"""Text to batches: files, corpora, mixtures, packing of sequences into rows, labels."""
