"""What an operator looks at."""
