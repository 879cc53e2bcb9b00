"""What a pasted log, error or device listing says, why it happened, and what would help."""
