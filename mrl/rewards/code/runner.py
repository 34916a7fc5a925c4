"""Runner inside the sandbox, in the candidate's process. A bare interpreter gets this text; it imports
nothing of ours and contains no secrets: no expected values, one input at a time.

Frames on the request descriptor: the set-up, then one call each. Frames on the reply descriptor: "ready",
"loaded", then one reply per call with the call's number. The verifier trusts none of them.
"""

import json
import os
import resource
import struct
import sys

HARNESS = (
    *("collections", "typing", "itertools", "functools", "heapq", "bisect", "math", "operator", "random"),
    *("statistics", "string", "re", "datetime", "copy", "io", "sys", "json", "time", "fractions"),
)
"""Modules whose names the harnesses of LeetCode, APPS, TACO and LiveCodeBench import before a program."""
THREAD_STACK_BYTES = 8 * 2**20
BUILT_IN = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
TAGS = {list: "l", tuple: "t", set: "s", frozenset: "z"}
TOO_DEEP = "nested too deep"


def _foreign_value(name):
    return {"x": name[:60]}


def encode_tagged(value, foreign=_foreign_value, depth=0):
    """Return a built-in value (of a subclass as the built-in) as tagged JSON, else `foreign(type name)`."""
    kind = type(value)
    if kind not in BUILT_IN:
        kind = next((base for base in kind.__mro__ if base in BUILT_IN), None)
    if depth > 100:
        return foreign(TOO_DEEP)
    if value is None or kind is bool:
        return value
    if kind is str:
        return str.__str__(value)
    if kind is int:
        number = int.__int__(value)
        return number if -(2**53) < number < 2**53 else {"i": hex(number)}
    if kind is float:
        return {"f": float.hex(value)}
    if kind is complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"b": bytes.hex(value)}
    if kind is dict:
        return {
            "d": [[encode_tagged(part, foreign, depth + 1) for part in item] for item in dict.items(value)]
        }
    if kind in TAGS:
        return {TAGS[kind]: [encode_tagged(item, foreign, depth + 1) for item in value]}
    return foreign(type(value).__name__)


def decode_tagged(data):
    """Return the value of tagged JSON, for inputs."""
    if not isinstance(data, dict):
        return data
    ((tag, body),) = data.items()
    if tag == "i":
        return int(body, 16)
    if tag == "f":
        return float.fromhex(body)
    if tag == "c":
        return complex(float.fromhex(body[0]), float.fromhex(body[1]))
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "d":
        return {decode_tagged(key): decode_tagged(item) for key, item in body}
    return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](decode_tagged(item) for item in body)


def _read_frame(descriptor):
    header = read_exactly(descriptor, 4)
    return json.loads(read_exactly(descriptor, struct.unpack("<I", header)[0]))


def read_exactly(descriptor, count):
    data = b""
    while len(data) < count:
        chunk = os.read(descriptor, count - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def write_frame(descriptor, message):
    try:
        data = json.dumps(message).encode()
    except (ValueError, RecursionError, MemoryError):
        data = b'{"raised": "value that cannot be sent"}'
    data = struct.pack("<I", len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def limit(limits, recursion):
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    sys.setrecursionlimit(recursion)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    import _thread

    _thread.stack_size(THREAD_STACK_BYTES)  # else it is the main thread's, which is the whole memory
    deepen(recursion)


def deepen(recursion):
    """Let calls through C (functools.cache, max over a generator) nest as deep as the stack allows. CPython
    3.12 and 3.13 end them after some hundred, whatever the recursion limit."""
    if sys.version_info[:2] not in ((3, 12), (3, 13)):
        return
    try:
        import ctypes
    except ImportError:  # a Python without libffi
        return
    state = ctypes.pythonapi.PyThreadState_Get
    state.restype = ctypes.c_void_p
    fields = (ctypes.c_int * 32).from_address(state())
    # CPython's Include/cpython/pystate.h: py_recursion_remaining, py_recursion_limit, c_recursion_remaining
    matches = [n for n in range(1, 31) if fields[n] == recursion and 0 < recursion - fields[n - 1] < 100]
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if len(matches) == 1 and 0 < fields[matches[0] + 1] < stack // 1024:
        fields[matches[0] + 1] = stack // 1024


def error_message(error):
    """Return an exception's type names and text, without a call of its methods."""
    kinds = [kind.__name__[:60] for kind in type(error).__mro__]
    text = next((argument[:1000] for argument in error.args[:1] if type(argument) is str), "")
    return {"raised": kinds[0], "bases": kinds[:20], "text": text}


def main(requests, replies):
    write_frame(replies, {"ready": True})
    setup = _read_frame(requests)
    limit(setup["limits"], setup["recursion"])
    add_builtins_of_site()
    sys.argv = ["candidate.py"]
    if "cells" in setup:
        serve_cells(setup["cells"], requests, replies)
    elif setup["entry_point"] is None:
        os.close(requests)
        os.close(replies)
        run_as_main(setup["program"])
    else:
        _serve(setup, requests, replies)


def add_builtins_of_site():
    """Add exit, quit and the other built-ins of a Python without -S."""
    import _sitebuiltins
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    for name in ("copyright", "credits", "license"):
        setattr(builtins, name, _sitebuiltins._Printer(name, sys.copyright))


def run_as_main(program):
    execute(program, "__main__")


def function_of(program, entry_point):
    """Return the entry point: a method of its `Solution` (a new object per call), else its function."""
    names = execute(program, "candidate")
    solution = names.get("Solution")
    if isinstance(solution, type) and hasattr(solution, entry_point):
        return lambda *arguments, **named: getattr(solution(), entry_point)(*arguments, **named)
    return names[entry_point]


def execute(program, name):
    """Run a program as a module of that name; return its names."""
    code = compile(program, "candidate.py", "exec")
    module = sys.modules[name] = type(sys)(name)
    names = vars(module)
    names.update(__file__="candidate.py", __builtins__=__builtins__, **given(program))
    exec(code, names)
    return names


def given(program):
    """Return the harness's names that a program reads but does not bind itself."""
    import builtins
    import symtable

    top = symtable.symtable(program, "candidate.py", "exec")
    bound = {
        symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    read, tables = set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
    wanted = read - bound - vars(builtins).keys()
    names = {name: __import__(name) for name in HARNESS if name in wanted}
    for module in map(__import__, HARNESS if wanted - names.keys() else ()):
        public = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        names.update((n, getattr(module, n)) for n in public if n in wanted and n not in names)
        if names.keys() == wanted:
            break
    return names


def _serve(setup, requests, replies):
    try:
        function = function_of(setup["program"], setup["entry_point"])
    except BaseException as error:
        write_frame(replies, error_message(error))
        os._exit(1)
    write_frame(replies, {"loaded": True})
    while True:
        call = _read_frame(requests)
        try:
            arguments = [decode_tagged(value) for value in call["args"]]
            named = {name: decode_tagged(value) for name, value in call["kwargs"].items()}
            answer = {"id": call["id"], "value": encode_tagged(function(*arguments, **named))}
        except BaseException as error:
            answer = {"id": call["id"]} | error_message(error)
        write_frame(replies, answer)


class Output:
    """Output of a cell, up to a limit."""

    def __init__(self, limit):
        self.limit, self.parts, self.length, self.encoding = limit, [], 0, "utf-8"

    def write(self, text):
        text = str(text)
        left = max(0, self.limit - self.length)
        if left:
            self.parts.append(text[:left])
        self.length += len(text)
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return False

    def text(self):
        excess = self.length - self.limit
        return "".join(self.parts) + (f"\n[{excess} more characters]" if excess > 0 else "")


def serve_cells(limit, requests, replies):
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    write_frame(replies, {"loaded": True})
    while True:
        call = _read_frame(requests)
        sys.stdout = sys.stderr = output = Output(limit)
        error = run_cell(call["cell"], names, output)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        write_frame(replies, {"id": call["id"], "output": output.text(), "error": error})


def run_cell(source, names, output):
    """Run a cell, print the value of its last expression and return its error, or ""."""
    import ast
    import traceback

    try:
        tree = ast.parse(source, "cell")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None:
                output.write(repr(value) + "\n")
        return ""
    except BaseException as error:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return "".join(line for line in lines if "/runner.py" not in line)[-2000:]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
