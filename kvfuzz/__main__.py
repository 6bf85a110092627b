"""`python -m kvfuzz`: the same as the console script."""

import sys

from kvfuzz.front.entry import main

if __name__ == "__main__":
    sys.exit(main())
