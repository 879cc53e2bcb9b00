"""Whether a server starts, asked as users ask it: by options, a scenario, or measured numbers; with advice."""
