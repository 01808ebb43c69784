"""``python -m vlora_sgl.export``."""

import sys

from vlora_sgl.export.run import main

if __name__ == "__main__":
    sys.exit(main())
