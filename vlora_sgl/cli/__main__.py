"""``python -m vlora_sgl.cli``."""

import sys

from vlora_sgl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
