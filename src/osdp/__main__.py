"""`python -m osdp` is the command `osdp`."""

import sys

from osdp.cli.main import main

sys.exit(main())
