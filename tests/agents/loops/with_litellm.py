"""LiteLLM as its documentation has the loop: the reply's message goes back as it came."""

import json
import sys

import litellm
from task import QUESTION, SAMPLING, arguments, report, weather

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
url, model = arguments()
kind = sys.argv[3]
base = url if kind in ("anthropic", "ollama_chat") else f"{url}/v1"
messages = [{"role": "user", "content": QUESTION}]
for choice in ("auto", "none"):
    offered = {"tools": [TOOL], "tool_choice": choice}
    if kind == "ollama_chat" and choice == "none":
        offered = {}  # Its interface has no choice: LiteLLM would offer them all the same.
    reply = litellm.completion(
        model=f"{kind}/{model}",
        api_base=base,
        api_key="x",
        messages=messages,
        **offered,
        **SAMPLING,
    )
    said = reply.choices[0].message
    messages.append(said)
    if not said.tool_calls:
        break
    for call in said.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
report(said.content)
