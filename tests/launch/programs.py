"""Programs of runs of tests, which call the policy by OpenAI's and Anthropic's clients."""

from __future__ import annotations

from typing import Any

import anthropic
import openai

from mrl.agents.environment import Model


class Chatting:
    """Three turns by OpenAI's client, one a response, a summary of its own, and one by Anthropic's."""

    def run(self, task: dict[str, Any], seed: int, model: Model) -> float:
        client = openai.OpenAI()
        messages, texts = list(task["prompt"]), list[str]()
        for number in range(3):
            if number == 1:
                events = list(client.responses.create(model="policy", input=messages, stream=True))
                texts.append(events[-1].response.output_text)  # completed, or incomplete if it was cut
            else:
                answer = client.chat.completions.create(model="policy", messages=messages)
                texts.append(answer.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": texts[-1]})
            messages.append({"role": "user", "content": f"{number} é語👩 <|im_end|> {len(texts[-1])}"})
        summary = [{"role": "user", "content": f"So far: {'; '.join(texts)[:60]}"}]
        with anthropic.Anthropic().messages.stream(model="policy", max_tokens=16, messages=summary) as stream:
            texts.append("".join(stream.text_stream))
        return sum(letter.islower() for text in texts for letter in text) / max(1, sum(map(len, texts)))
