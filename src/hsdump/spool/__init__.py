"""The hand-over between a server process and a collector on the same host, in shared memory.

    <spool>/server-<pid>.json   what each capturing scheduler process offers; valid while `server-<pid>.lock` is held
    <spool>/clients/<run>.lock  held by each client that is alive
    <spool>/partial/<rid>       an entry whose rows are still coming in
    <spool>/ready/<rid>         a complete entry; appears by rename, never half
    <spool>/failed/<rid>        why this request has no entry

Both sides import this package, so it is standard library only.
"""
