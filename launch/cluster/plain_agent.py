"""Run Ray's node agent as if the dashboard's packages were missing: `plain_agent.py RAY'S_AGENT.py
ARGUMENTS`.

A node needs its agent. With those packages, which vLLM installs, the agent loads the dashboard's modules and
looks for a dashboard every second.
"""

import runpy
import sys

sys.modules["aiohttp_cors"] = None  # type: ignore[assignment]  # Ray then assumes that all are missing
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
