"""`python -m hetpipe`."""

import sys

from hetpipe.cli import main

sys.exit(main())
