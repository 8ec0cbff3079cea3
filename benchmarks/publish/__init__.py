"""From results to tables and plots, and the plan of what is due."""
