"""Encoder inference: embeddings and classification of texts, without padding."""
