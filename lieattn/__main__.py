"""``python -m lieattn`` is the same as the command ``lieattn``."""

import sys

from lieattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
