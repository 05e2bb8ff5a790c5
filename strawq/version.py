"""The version, in one place. It imports nothing of strawq, so that the build can read it without running strawq."""

from typing import Final

VERSION: Final = "0.1.0"
