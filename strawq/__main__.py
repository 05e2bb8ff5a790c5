"""`python -m strawq` is `strawq`."""

from __future__ import annotations

import sys

from strawq.cli import main

if __name__ == "__main__":
    sys.exit(main())
