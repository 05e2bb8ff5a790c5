"""Everything that touches a file system: the `Files` port and its implementations, the probe, the log, objects, packs,
sessions.

Nothing here decides what may happen; that is `strawq.core`. Nothing above here opens a file.
"""
