"""pydantic-ai over /v1/chat/completions."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from task import QUESTION, SAMPLING, arguments, report, weather


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return weather(city)


url, model = arguments()
agent = Agent(
    OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x")),
    instructions="You help with the weather.",
    model_settings=SAMPLING,
    output_type=[get_weather, str],
)
report(agent.run_sync(QUESTION).output)
