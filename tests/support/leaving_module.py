"""A script of a user's without a guard: whoever imports it is ended, as if all had gone well."""

import sys

sys.exit(0)
