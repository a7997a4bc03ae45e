"""Changing the installed source of an SGLang without a plugin API, as a transaction, and giving it back byte for byte.

Runs on the server's host while the server is stopped. Standard library only; SGLang is never imported here.
"""
