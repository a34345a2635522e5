"""Let `python -m dynamemo` be the command `dynamemo`."""

from __future__ import annotations

import sys

from dynamemo.cli import main

sys.exit(main())
