"""mini-swe-agent repairs repositories by shell commands in a sandbox; hidden tests in a fresh one judge.

    LITELLM_LOCAL_MODEL_COST_MAP=True mrl train MODEL.yaml examples/programs/mini_swe_agent.yaml

needs a model that can use a shell, and the packages of `make programs`. The variable avoids a download.
"""

from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from mrl.agents.sandboxes.providers import open_sandbox
from mrl.agents.sandboxes.work_files import overlay, read_folder


class Repair(LocalEnvironment):
    """Task of mrl and environment of mini-swe-agent. Row: {"prompt": [...], "repository": "ledger"}."""

    def run(self, task, seed, model):
        name, config = task["repository"], get_config_from_spec("mini.yaml")
        folder = Path(__file__).parent / "repairs" / name
        policy = {"model_name": f"openai/{model.name}", "cost_tracking": "ignore_errors", **config["model"]}
        with open_sandbox() as self.sandbox:
            self.sandbox.write(read_folder(folder / "repository"))
            agent = DefaultAgent(LitellmModel(**policy), self, **config["agent"])
            agent.run(task["prompt"][-1]["content"])
            kept = self.sandbox.read([f"{name}/*"])
        with open_sandbox() as fresh:  # it gets only the package of what the agent left
            fresh.write(overlay(read_folder(folder / "hidden"), kept))
            return float(fresh.run(["python3", "hidden_test.py"], seconds=60).status == 0)

    def execute(self, action, cwd="", *, timeout=None):
        done = self.sandbox.run(["bash", "-c", action["command"]], seconds=60, env={"PAGER": "cat"})
        error = f"killed after {done.seconds:.0f} s" if done.timed_out else ""
        output = {"output": done.output, "returncode": done.status, "exception_info": error}
        self._check_finished(output)
        return output
