"""The driver: samples in, requests out, states collected and committed, everything counted."""
