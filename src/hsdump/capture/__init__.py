"""Rows of states out of a running model and into the spool. Runs inside the server; knows no engine by name."""
