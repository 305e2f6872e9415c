"""Anthropic's tool runner over /v1/messages."""

from anthropic import Anthropic, beta_tool
from task import QUESTION, arguments, report, weather


@beta_tool
def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city.
    """
    return weather(city)


url, model = arguments()
client = Anthropic(base_url=url, api_key="x")
runner = client.beta.messages.tool_runner(
    model=model,
    max_tokens=64,
    tools=[get_weather],
    max_iterations=2,
    extra_body={"temperature": 0},
    messages=[{"role": "user", "content": QUESTION}],
)
turns = list(runner)  # The second is asked with the first one's blocks and the tool's result.
results = runner.generate_tool_call_response()
report(results["content"][0]["content"] if results else turns[-1].content)
