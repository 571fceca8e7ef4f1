"""Complete verification: answers that leave nothing open, given time."""
