"""python -m benchmarks.gateway: measure the processor time of a gateway turn, without an engine.

A client in a process of its own holds a conversation with tool calls until the context is long enough, then
sends turn after turn that continue it at the same place. A turn costs the time from one generation's start to
the next: HTTP, JSON, the place in the tree, tokens of new messages, the answer. The engine's part is absent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import http.client
import json
import multiprocessing
import pstats
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from transformers import AutoTokenizer

from mrl.agents.episode import Limits
from mrl.gateway.server import Gateway
from mrl.gateway.session import ModelSession
from mrl.gateway.templates import Templates
from mrl.observe.driver_memory import tune_driver_memory
from mrl.prepare.tokenizer import write_bpe
from mrl.rollout.request import Completion, GenerationRequest, prompt_digest
from mrl.samples import ResponseSegment, Status

ROOT = Path(__file__).parents[1]
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
WARM_UP_TURNS = 40
"""Turns of the conversation before the measured ones."""
CHATML = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}"
    "\n</tool_response><|im_end|>\n{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor -%}"
    "<|im_end|>\n{% endif -%}{%- endfor -%}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
SAID = (
    "I will look at the file first, because the test that fails imports it.\n"
    '<tool_call>\n{"name": "run_0", "arguments": {"command": "cat setup.py && ls -l"}}\n</tool_call>'
)


class OneAnswer:
    """Policy that says SAID, and notes the processor time at each request."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokens = np.array([*tokenizer(SAID)["input_ids"], tokenizer.eos_token_id], np.int32)
        self._logprobs = np.full(len(self._tokens), -0.5, np.float32)
        self.seconds: list[float] = []

    async def generate(self, request: GenerationRequest, so_far: Completion | None = None) -> Completion:
        self.seconds.append(time.process_time())
        digest, count = prompt_digest(request.prompt_tokens), len(self._tokens)
        segment = ResponseSegment(0, count, 0, request.attempt, 0, digest)
        return Completion(request.request_id, self._tokens, self._logprobs, (segment,), Status.FINISHED, SAID)


class Client:
    """Conversation of one program, by one API."""

    def __init__(self, url: str, key: str, api: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"))
        self._headers = {"x-api-key": key, "Content-Type": "application/json"}
        self._api = api
        self.items: list[Any] = []

    def send(self, items: list[Any]) -> tuple[list[Any], str, int]:
        """Return the items of the policy's turn, its call's id, and the tokens before it."""
        field = "input" if self._api == "responses" else "messages"
        body = {"model": "policy", field: items, "tools": self._tools(), "max_tokens": 1000}
        self._connection.request("POST", PATHS[self._api], json.dumps(body), self._headers)
        answer = json.loads(self._connection.getresponse().read())
        if self._api == "chat":
            message = answer["choices"][0]["message"]
            return [message], message["tool_calls"][0]["id"], answer["usage"]["prompt_tokens"]
        count = answer["usage"]["input_tokens"]
        if self._api == "messages":
            return [{"role": "assistant", "content": answer["content"]}], answer["content"][-1]["id"], count
        return answer["output"], answer["output"][-1]["call_id"], count

    def result(self, call_id: str, text: str) -> Any:
        """Return the item of a tool's result."""
        if self._api == "chat":
            return {"role": "tool", "tool_call_id": call_id, "content": text}
        if self._api == "messages":
            block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
            return {"role": "user", "content": [block]}
        return {"type": "function_call_output", "call_id": call_id, "output": text}

    def _tools(self) -> list[dict[str, Any]]:
        properties = {"command": {"type": "string", "description": "The command line that bash runs."}}
        schema = {"type": "object", "properties": properties, "required": ["command"]}
        tools = [
            {"name": f"run_{n}", "description": "Run a command in the working folder; return its output."}
            for n in range(5)
        ]
        if self._api == "chat":
            return [{"type": "function", "function": tool | {"parameters": schema}} for tool in tools]
        if self._api == "messages":
            return [tool | {"input_schema": schema} for tool in tools]
        return [tool | {"type": "function", "parameters": schema} for tool in tools]


def converse(url: str, key: str, api: str, tokens: int, turns: int, words: Sequence[str]) -> None:
    """Hold a conversation up to `tokens` of context; then send `turns` requests that continue it there."""
    client, used = Client(url, key, api), 0
    made, call_id, count = client.send([{"role": "user", "content": "Repair the test."}])
    items = [{"role": "user", "content": "Repair the test."}, *made]
    while count < tokens:
        # English has about 0.7 words a token here; a turn has SAID and its marks besides.
        size = max(5, int(0.7 * (tokens / WARM_UP_TURNS - 80)))
        text, used = " ".join(words[used % 9000 : used % 9000 + size]), used + size
        items.append(client.result(call_id, text))
        made, call_id, count = client.send(items)
        items += made
    print(f"{api}: {count} tokens of context, {len(items)} items, {len(json.dumps(items))} bytes", flush=True)
    for number in range(turns):
        text = " ".join(words[number * 40 : number * 40 + 40])
        client.send([*items, client.result(call_id, f"{number} {text}")])


async def measured(options: argparse.Namespace, folder: str) -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/**/*.md"))]
    Path(folder, "pages.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    write_bpe([f"{folder}/pages.jsonl"], f"{folder}/model", vocab_size=8000)
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
    marks = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks, "eos_token": "<|im_end|>"})
    tokenizer.chat_template = CHATML
    templates, gateway = Templates(tokenizer), Gateway()
    words = " ".join(pages).split()[:20_000]
    tune_driver_memory()  # as in launch/commands/start_run.py
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):  # alternated: the machine's other work hits all alike
        for api, tokens in ((api, tokens) for tokens in options.tokens for api in options.apis):
            turns = await _turns(gateway, templates, api, tokens, options, words)
            seconds.setdefault((api, tokens), []).append(statistics.median(turns))
    for (api, tokens), medians in seconds.items():
        figures = ", ".join(f"{1000 * second:.2f}" for second in medians)
        print(
            f"{api:9} {tokens:6} tokens: {1000 * statistics.median(medians):.2f} ms of processor a turn "
            f"(medians of {options.turns} turns: {figures})"
        )


async def _turns(
    gateway: Gateway,
    templates: Templates,
    api: str,
    tokens: int,
    options: argparse.Namespace,
    words: Sequence[str],
) -> list[float]:
    """Return the processor seconds of each turn."""
    policy, limits = OneAnswer(templates.tokenizer), Limits(1000, 1 << 20, 1 << 20, 1000)
    request = GenerationRequest("0.0", np.zeros(1, np.int32), 0, 1)
    session = ModelSession(policy, templates, limits, request, run_seed=1)
    profile = cProfile.Profile() if options.profile else None
    async with gateway.opened(session) as model:
        arguments = (model.url, model.key, api, tokens, options.turns, words)
        client = multiprocessing.get_context("spawn").Process(target=converse, args=arguments)
        client.start()
        with profile or contextlib.nullcontext():
            await asyncio.to_thread(client.join)
    if client.exitcode:
        raise SystemExit(f"the client of {api} exited with {client.exitcode}")
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)
    return np.diff(policy.seconds[-options.turns :]).tolist()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2500, 36000], help="tokens of context")
    parser.add_argument("--apis", choices=PATHS, nargs="+", default=list(PATHS))
    parser.add_argument("--turns", type=int, default=200, help="measured turns of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=int, default=0, help="number of functions to print")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mrl-gateway-") as folder:
        uvloop.run(measured(options, folder))


if __name__ == "__main__":
    main()
