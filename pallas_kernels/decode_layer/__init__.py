"""A decoder layer from one attention to the next, for few requests."""
