"""Own environment: a lock that counts correct digits (`agent.environment: own_environment.py:Lock`)."""

import random

from mrl.agents.environment import Step
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.pool import EnvironmentWorkers


class Lock:
    def reset(self, task, seed):
        self.secret = task.get("secret") or f"{random.Random(seed).randrange(1000):03}"
        return "Open the lock: three digits."

    def step(self, text, calls):
        right = sum(a == b for a, b in zip(self.secret, text.strip(), strict=False))
        return Step(f"{right} right", reward=float(right == 3), done=right == 3)

    def close(self):
        pass


if __name__ == "__main__":  # an episode by hand, in processes as in a run
    with EnvironmentWorkers({"lock": EnvironmentSpec(f"{__file__}:Lock")}) as pool:
        pool.open("by hand", "lock", {"secret": "271"}, seed=0)
        print(pool.poll(60)[0].messages[0]["content"])
        for guess in ("171", "281", "271"):
            pool.step("by hand", guess)
            answer = pool.poll(60)[0]
            print(guess, answer.reward, answer.done, *(m["content"] for m in answer.messages))
