"""Embeddings and labels of texts by encoders, without computation on padding."""
