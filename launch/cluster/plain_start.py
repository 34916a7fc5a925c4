"""Ray's command as if the package of its client were not installed: `python plain_start.py start ...`.

`ray start` would start a server for `ray://` addresses, which nobody here uses. Ray gives a shell the path
of that server's Python without quotes, and ends the whole node when the server ends: under a path with a
space no node stayed up.
"""

import sys

from ray.scripts import scripts

setattr(scripts, "get_ray_client_dependency_error", lambda: "nobody here uses it")  # noqa: B010
sys.exit(scripts.main())
