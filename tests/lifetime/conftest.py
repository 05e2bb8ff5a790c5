"""The command line in this process, and groups to keep or lose."""

from __future__ import annotations

from tests.cli.conftest import no_variables as no_variables
from tests.cli.conftest import pool as pool
from tests.cli.conftest import run as run
