"""``python -m hbmtwin`` is the same program as ``hbmtwin``."""

import sys

from hbmtwin.cli import main

if __name__ == "__main__":
    sys.exit(main())
