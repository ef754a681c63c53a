"""Pure decisions, tested without a clock."""
