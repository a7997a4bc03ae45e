"""Questions in, the target's own answers out, as exact tokens.

The ids of an answer are the ones that the server sampled; its text is never tokenized again to learn from. Client side:
httpx, sqlite and the prompts part; any SGLang server will do, with capture or without.
"""
