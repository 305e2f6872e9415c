"""LiteLLM the other way round: Anthropic's messages through it to our /v1/chat/completions."""

import asyncio

import litellm
from task import QUESTION, arguments, report, weather

TOOL = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


async def main() -> None:
    url, model = arguments()
    messages = [{"role": "user", "content": QUESTION}]
    for tools in ([TOOL], None):
        reply = await litellm.anthropic.messages.acreate(
            model=f"hosted_vllm/{model}",
            api_base=f"{url}/v1",
            api_key="x",
            messages=messages,
            tools=tools,
            max_tokens=64,
            temperature=0.0,
        )
        messages.append({"role": "assistant", "content": reply["content"]})
        used = [block for block in reply["content"] if block["type"] == "tool_use"]
        if not used:
            break
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": weather(**block["input"]),
            }
            for block in used
        ]
        messages.append({"role": "user", "content": results})
    report("".join(block.get("text", "") for block in reply["content"]))


asyncio.run(main())
