"""Every limit of strawq, in one place. Units are last in the name."""

from __future__ import annotations

FORMAT_VERSION = 1
"""Of the whole pool. A pool of another version is refused with a sentence."""

# The log.
ENTRIES_PER_SEGMENT = 1000
"""Names in one directory of the log."""
COMMANDS_PER_ENTRY = 256
"""Commands that one group commit merges."""
ENTRY_INLINE_BYTES = 1 << 20
"""Payload that one entry may carry behind its JSON line, all publications together."""
INLINE_OBJECT_BYTES = 64 << 10
"""A publication up to this size rides inside the entry that refers to it."""
COMMIT_TRIES = 2000
"""Races that one group commit may lose before `Contended`."""
RELOAD_TRIES = 40
"""Times a reader below a floor looks for a newer snapshot."""
VOIDED_IN_A_ROW = 16
"""Torn entries, one behind the other, that one repair passes over."""
UNKNOWN_TRIES = 8
"""Times a publish whose reply was lost is asked about again."""
SNAPSHOT_ENTRIES = 512
"""A snapshot is due after so many entries, and not before the entries outweigh it."""
SNAPSHOT_AT_STOP = 64
"""A clean stop writes a snapshot if the newest one is older than so many entries."""
SNAPSHOTS_KEPT = 3
TRIM_ENTRIES = 2 * ENTRIES_PER_SEGMENT
"""Entries behind the newest snapshot that stay readable as history."""

# State.
REQUESTS_KEPT = 8192
"""Items of answered requests that the state remembers for a late retry."""
RECEIPTS_KEPT = 4096
"""Ended tasks whose outcome each queue remembers for a late retry."""
DROP_REASONS = 64
"""Distinct drop reasons that are counted by name; the rest are counted as `other`."""
NAME_BYTES = 64
"""Of queue, checkpoint, branch, producer and consumer names."""
REQUEST_BYTES = 128
"""Of a request id."""
TEXT_BYTES = 4096
"""Of a reason or an error text kept in the state; longer ones are cut."""
METADATA_BYTES = 64 << 10
"""Of a checkpoint's metadata and a producer's cursor, each."""
PARTS_PER_TASK = 4096
"""Slices that one growing group may consist of."""
ROWS_PER_OBJECT = 16384
OBJECT_BYTES = 8 << 20
"""A submission is split into objects of at most so many rows and about so many bytes."""

# Merging.
MERGE_FILES = 64
"""Files that hold little live data in closed epochs: from so many on they are merged."""
MERGED_FILE_BYTES = 4 << 20
MERGED_OBJECTS = 512
"""A merged file holds at most so many bytes and objects. One of which no more than half are live is merged again."""
MERGE_OBJECT_BYTES = INLINE_OBJECT_BYTES
"""Larger objects are not copied again: a file each is no burden then."""

# Leases.
LEASE_SECONDS = 30.0
LEASE_SECONDS_MIN = 0.2
MAX_ATTEMPTS = 5
MAX_EXPIRATIONS = 20

# Payloads.
CHUNK_BYTES = 256 << 10
"""Of a tensor that share one digest: as many whole rows as fit, at least one."""
PACK_HEADER_BYTES = 100_000_000
"""What every safetensors reader accepts."""
PACK_HEADER_CACHE_BYTES = 16 << 20
"""Memory of the verified pack headers that one reader keeps."""
READ_SPARE_BYTES = 128 << 20
"""Memory of arrays that were read and let go which one reader keeps for the next ones."""
READ_AGAIN_SECONDS = (0.02, 0.1)
"""Pauses after which bytes of a pack that were absent, short or wrong are read again before that is believed."""
