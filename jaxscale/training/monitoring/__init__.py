"""What a run says of itself: progress, metrics, device events and diverged losses."""
