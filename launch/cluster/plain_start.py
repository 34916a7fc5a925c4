"""Run Ray's command as if the Ray client were not installed: `python plain_start.py start ...`.

`ray start` would start a server for `ray://` addresses, which is not used here. Ray passes that server's
Python path to a shell unquoted, and ends the node if the server ends: under a path with a space no node would
stay up.
"""

import sys

from ray.scripts import scripts

setattr(scripts, "get_ray_client_dependency_error", lambda: "it is not used here")  # noqa: B010
sys.exit(scripts.main())
