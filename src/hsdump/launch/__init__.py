"""Starting a server with capture on: `hsdump serve`. Runs on the server's host, outside the server's processes."""
