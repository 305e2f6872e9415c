"""OpenAI's Agents SDK over /v1/chat/completions; with a third argument over /v1/responses."""

import sys

from openai import AsyncOpenAI
from task import QUESTION, SAMPLING, arguments, report, weather

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city.
    """
    return weather(city)


url, model = arguments()
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="x")
kind = OpenAIResponsesModel if len(sys.argv) > 3 else OpenAIChatCompletionsModel
agent = Agent(
    name="helper",
    instructions="You help with the weather.",
    model=kind(model=model, openai_client=client),
    model_settings=ModelSettings(**SAMPLING, parallel_tool_calls=False),
    tools=[get_weather],
    tool_use_behavior="stop_on_first_tool",
)
report(Runner.run_sync(agent, QUESTION, max_turns=4).final_output)
