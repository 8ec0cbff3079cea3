"""What each route of the server answers."""
