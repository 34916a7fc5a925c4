"""Use the maths verifier as a library to check the answer in a response.

It runs in this process, so use it for responses you trust; a run verifies in reward workers with deadlines.
"""

from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.maths_verifier import verify_exactly, verify_symbolically

RULES = MathsRules()
CASES = [
    ("37 + 58 = 95, so \\boxed{95}", "95"),
    ("The answer is \\boxed{\\frac{1}{2}}", "0.5"),
    ("\\boxed{(x-1)(x+1)}", "x^2-1"),
    ("\\boxed{2 or 3}", "2"),  # two answers count as incorrect
    ("I do not know", "7"),
]

for response, truth in CASES:
    verdict = verify_exactly(response, truth, RULES) or verify_symbolically(response, truth, RULES)
    print(f"{verdict.value}  {truth:8} {response}")
