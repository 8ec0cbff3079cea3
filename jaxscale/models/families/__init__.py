"""The families of models: their configurations, and their names in files."""
