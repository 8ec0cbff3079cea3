"""``python -m jaxscale`` is ``jaxscale``."""

import sys

from jaxscale.cli import main


if __name__ == "__main__":
    sys.exit(main())
