"""``python -m monarch_titan``: the command without its console script."""

import sys

from monarch_titan.cli import main

if __name__ == "__main__":
    sys.exit(main())
