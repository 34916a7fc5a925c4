"""Ray's agent of a node as where the packages of its dashboard are not installed: `python plain_agent.py RAY'S_AGENT.py ARGUMENTS`.

A node does not live without its agent. With those packages, which vLLM brings, it loads the dashboard's modules and looks for a dashboard every second.
"""

import runpy
import sys

sys.modules["aiohttp_cors"] = None  # type: ignore[assignment]  # Ray takes its absence for that of all of them
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
