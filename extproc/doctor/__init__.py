"""`tidegate doctor`: what is true of a gateway as its clients see it, proven from outside, and what to change."""
