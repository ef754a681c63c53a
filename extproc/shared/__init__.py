"""Where capacity is counted."""
