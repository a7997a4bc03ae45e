"""The whole job in small: a tiny model, prompts of our own, no server and no download."""
