"""The maths verifier as a library: is the answer in this response the right one?"""

from mrl.rewards.maths.plain import verify

CASES = [
    ("37 + 58 = 95, so \\boxed{95}", "95"),
    ("The answer is \\boxed{\\frac{1}{2}}", "0.5"),
    ("\\boxed{(x-1)(x+1)}", "x^2-1"),
    ("\\boxed{2 or 3}", "2"),  # a hedge is wrong
    ("I do not know", "7"),
]

for response, ground_truth in CASES:
    verdict = verify(response, ground_truth)
    print(f"{verdict.value}  {ground_truth:8} {response}")
