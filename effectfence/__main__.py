"""`python -m effectfence`: the same as the command `effectfence`."""

import sys

from effectfence.cli import main

if __name__ == "__main__":
    sys.exit(main())
