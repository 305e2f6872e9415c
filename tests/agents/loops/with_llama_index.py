"""LlamaIndex's FunctionAgent."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from task import QUESTION, arguments, report, weather


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return weather(city)


TOOL = FunctionTool.from_defaults(get_weather, return_direct=True)


async def main() -> None:
    url, model = arguments()
    llm = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="x",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0.0,
        max_tokens=64,
        context_window=8192,
    )
    agent = FunctionAgent(tools=[TOOL], llm=llm)
    report(await agent.run(QUESTION))


asyncio.run(main())
