"""What is told of requests."""
