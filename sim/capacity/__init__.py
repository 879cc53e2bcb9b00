"""How much a server holds: loads at which its memory runs out, and the least memory that serves a load."""
