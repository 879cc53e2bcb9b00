"""``python -m hbmtwin`` is the same program as ``hbmtwin``."""

from hbmtwin.cli import main

if __name__ == "__main__":
    main()
