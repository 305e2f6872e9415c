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
    model=model, max_tokens=160, temperature=0.0, tools=[get_weather], max_iterations=4,
    messages=[{"role": "user", "content": QUESTION}],
)  # fmt: skip
last = runner.until_done()
report("".join(block.text for block in last.content if block.type == "text"))
