"""Workers that lease prompts from a strawq pool, drive inference engines, and commit complete groups."""
