"""smolagents' ToolCallingAgent."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from task import QUESTION, SAMPLING, arguments, report, weather


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city.
    """
    return weather(city)


url, model = arguments()
chat = OpenAIServerModel(model_id=model, api_base=f"{url}/v1", api_key="x", **SAMPLING)
agent = ToolCallingAgent(tools=[get_weather], model=chat, max_steps=2, verbosity_level=0)
report(agent.run(QUESTION))
