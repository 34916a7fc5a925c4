"""Programs that pass the data sets' own judges pass here too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import DataError
from mrl.rewards.code import runner
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.code_verifier import verify_program
from mrl.rewards.code.program import program_in
from mrl.rewards.code.tasks import parse_task
from mrl.rewards.kinds.code import Code
from mrl.rewards.kinds.reward_section import KindPart

PATIENT = CodeRules(seconds=60.0, cpu_seconds=60.0)
READS = {"inputs": ["0\n", "2\n"], "outputs": ["none\n", "2\n"]}
DEEP = {"inputs": ["50000"], "outputs": ["50000"]}
DEEP_CALL = {"fn_name": "f", "inputs": [[50_000]], "outputs": [50_000]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
IN_ONES = ADD | {"outputs": [[3], [7]]}
AS_TEXT = ADD | {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}
LISTS = {"fn_name": "f", "inputs": ['[1, 2]\n"a"', '[]\n"b"'], "outputs": ['[1, 2, "a"]', '["b"]']}
SOLUTION = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b"
CHECK = "def check(candidate):\n    assert candidate(a=1, b=2) == 3\n    assert candidate(2, 2) == 4\n"

RIGHT: dict[str, tuple[dict[str, Any], str]] = {
    "exit": (READS, "n = int(input())\nif n == 0:\n    print('none')\n    exit()\nprint(n)"),
    "quit": (READS, "n = int(input())\nif n == 0:\n    print('none')\n    quit(0)\nprint(n)"),
    "others of site": (ADD, "print(credits, copyright, license, help)\ndef add(a, b):\n    return a + b"),
    "arguments of the command line": (READS,
        "import sys\nassert sys.argv[1:] == [] and __file__\nprint(int(input()) or 'none')"),
    "its own main module": (READS, "import __main__\nx = 2\nprint(int(input()) and __main__.x or 'none')"),
    "standard streams as files": (READS,
        "n = int(open('/dev/stdin').read())\nopen('/dev/stdout', 'w').write(str(n or 'none'))"),
    "its own classes as pickles": (
        READS, "import pickle\nclass C: pass\npickle.loads(pickle.dumps(C()))\nprint(int(input()) or 'none')",
    ),
    "recursion in a thread": (DEEP,
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
        "def f(n): return n and 1 + f(n - 1)\nprint(f(int(input())))"),
    "many digits": ({"inputs": ["20000"], "outputs": ["1" + "0" * 20_000]}, "print(10 ** int(input()))"),
    "reads many digits": ({"inputs": ["7" * 9000], "outputs": ["1"]}, "print(int(input()) % 2)"),
    "recursion": (DEEP, "def f(n): return n and 1 + f(n - 1)\nprint(f(int(input())))"),
    "recursion through a cache": (DEEP_CALL, "@cache\ndef f(n): return n and 1 + f(n - 1)"),
    "recursion through built-ins": (DEEP_CALL, "def f(n): return n and 1 + max(f(m) for m in [n - 1])"),
    "recursion in an operator": (
        DEEP_CALL,
        "class C:\n    def __init__(self, n): self.n = n\n"
        "    def __add__(self, x): return x if not self.n else C(self.n - 1) + (x + 1)\n"
        "def f(n): return C(n) + 0",
    ),
    "own recursion limit": (DEEP,
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\n"
        "print(f(int(input())))"),
    "annotation without an import": ({"fn_name": "total", "inputs": [[[1, 2]]], "outputs": [3]},
        "def total(xs: List[int]) -> Optional[int]:\n    return sum(xs)"),
    "names of the standard library": (
        ADD,
        "def add(a, b):\n    h = []\n    heappush(h, -a), heappush(h, b)\n"
        "    assert Counter('aa')['a'] == gcd(2, 4) == 2 and deque([1]) and inf > 3\n"
        "    assert list(accumulate([1, 1])) == [1, 2] and bisect_left([1], 2) == 1 and ascii_lowercase[0] "
        "== 'a'\n    assert math.sqrt(4) == sqrt(4) and collections.defaultdict(int)[0] == 0"
        " and re.match('a', 'a') and copy.deepcopy([1])\n    return reduce(lambda x, y: x + y, [a, b])",
    ),
    "a name of the library that it defines": (ADD,
        "def gcd(a, b): return a + b\ndef add(a, b): return gcd(a, b)"),
    "standard input by a name of the library": (READS, "print(int(stdin.readline()) or 'none')"),
    "class Solution": (ADD, SOLUTION),
    "class Solution beside a helper": (ADD,
        "def add(x): return x\n" + SOLUTION.replace("a + b", "add(a) + add(b)")),
    "a new Solution for each case": (ADD,
        "class Solution:\n    def __init__(self): self.seen = 0\n    def add(self, a, b):\n"
        "        self.seen += 1\n        return a + b if self.seen == 1 else 0"),
    "class Solution, asserts": ({"entry_point": "Solution().add", "test": CHECK}, SOLUTION),
    "class Solution behind its starter code": (
        {"entry_point": "Solution.add", "test": CHECK,
         "prompt": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        "},
        SOLUTION,
    ),
    "a body behind its starter code": ({"entry_point": "add", "test": CHECK, "prompt": "def add(a, b):\n"},
        "    return a + b"),
    "values in lists of one": (IN_ONES, "def add(a, b):\n    return a + b"),
    "a list of one where it is returned": (IN_ONES, "def add(a, b):\n    return (a + b,)"),
    "arguments as JSON lines": (AS_TEXT, SOLUTION),
    "lists as JSON lines": (LISTS, "def f(xs, x): return xs + [x]"),
    "texts that are no JSON": ({"fn_name": "f", "inputs": ["ab", "1"], "outputs": ["ba", "1"]},
        "def f(x): return x[::-1]"),
    "integer keys": ({"fn_name": "f", "inputs": [[{"1": 2, "-3": 4}]], "outputs": [[4]]},
        "def f(d): return d[-3]"),
    "rounded output": ({"inputs": ["3\n"], "outputs": ["0.333333333\n"]}, "print(1 / int(input()))"),
    "tolerance of a stdin task": ({"inputs": ["3"], "outputs": ["0.3333"], "tolerance": 1e-3},
        "print(round(1 / int(input()), 5))"),
}  # fmt: skip

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "exit with a status": (READS, "print(int(input()) or 'none')\nexit(1)"),
    "a name that nothing has": (ADD, "def add(a, b): return a + b + nothing_has_it"),
    "another value in a list of one": (IN_ONES, "def add(a, b): return [a, b]"),
    "an inner value where only some are lists of one": (ADD | {"outputs": [[3], 7]},
        "def add(a, b): return a + b"),
    "an inner value of our own form": ({"entry_point": "f", "cases": [{"args": [1], "expected": [1]}]},
        "def f(x): return x"),
    "an inner value of JSON lines": (LISTS | {"outputs": ["[1]", "[2]"], "inputs": ["1\n1", "2\n2"]},
        "def f(x, y): return x"),
    "JSON lines as text": (AS_TEXT, "def add(a, b=''): return '3' if a == '1\\n2' else '7'"),
    "another method": (ADD, SOLUTION.replace("def add", "def sub")),
    "beyond the tolerance": ({"inputs": ["3"], "outputs": ["0.3333"], "tolerance": 1e-3}, "print(0.335)"),
    "endless recursion": (ADD, "def add(a, b): return add(a, b)"),
    "endless recursion through a cache": (ADD, "@cache\ndef add(a, b): return add(a, b + 1)"),
}  # fmt: skip


def value(raw: dict[str, Any], program: str) -> tuple[float | None, str]:
    task = parse_task(json.dumps(raw), place="x")
    extracted = program_in(f"```python\n{program}\n```", task)
    assert extracted is not None
    verdict = verify_program(extracted, task, PATIENT)
    return verdict.value, verdict.reason


@pytest.mark.parametrize("name", RIGHT)
def test_what_passes_there_passes(name: str) -> None:
    assert value(*RIGHT[name])[0] == 1.0, value(*RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_what_fails_there_fails(name: str) -> None:
    assert value(*WRONG[name])[0] == 0.0, value(*WRONG[name])


NESTED = """
import sys
sys.path.insert(0, {folder!r})
import runner
runner.limit({{}}, 100_000)
f = runner.function_of("@cache\\ndef f(n): return n and 1 + f(n - 1)", "f")
print(f(2000))
"""


def test_calls_through_c_nest_in_this_interpreter_too() -> None:
    """The sandbox may use another interpreter if its user cannot read this one's folder."""
    program = NESTED.format(folder=str(Path(runner.__file__).parent))
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2000\n", done.stderr[-500:]


UNPASSABLE: list[dict[str, Any]] = [
    {"inputs": ["1"], "outputs": ["7 " * 160_000]},
    {"fn_name": "f", "inputs": [[1]], "outputs": ["7" * 300_000]},
    {"fn_name": "f", "inputs": [[1]], "outputs": [[1] * 250_000]},
    {"fn_name": "f", "inputs": [[1]], "outputs": [1 << 70_000]},
    {"entry_point": "f", "cases": [{"args": [1], "expected": {1, 2, type}}]},
    {"inputs": ["\ud800"], "outputs": ["1"]},
    {"inputs": ["1"], "outputs": ["1"], "tolerance": "small"},
    {"inputs": ["1"], "outputs": ["1"], "tolerance": float("nan")},
    {"fn_name": "not a name", "inputs": [[1]], "outputs": [1]},
    {"fn_name": ["f"], "inputs": [[1]], "outputs": [1]},
]


@pytest.mark.parametrize("raw", UNPASSABLE, ids=range(len(UNPASSABLE)))
def test_a_task_that_no_program_can_pass_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"rows:4: .*"):
        parse_task(raw, place="rows:4")


def test_a_wanted_output_beyond_the_limit_is_refused() -> None:
    kind = Code(KindPart(kind="code"))
    kind.parse_ground_truth({"inputs": ["1"], "outputs": ["7" * 5000]}, place="x")
    with pytest.raises(DataError, match=r"rows:4: .*300000 bytes.*may write 262144; leave the row out"):
        kind.parse_ground_truth({"inputs": ["1"], "outputs": ["7" * 300_000]}, place="rows:4")
