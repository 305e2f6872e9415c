"""Ollama's client, with the loop of its documentation."""

import ollama
from task import QUESTION, arguments, report, weather


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city.
    """
    return weather(city)


url, model = arguments()
client = ollama.Client(host=url)
messages = [{"role": "user", "content": QUESTION}]
for tools in ([get_weather], None):
    reply = client.chat(model, messages, tools=tools, options={"temperature": 0, "num_predict": 64})
    messages.append(reply.message)
    if not reply.message.tool_calls:
        break
    for call in reply.message.tool_calls:
        result = get_weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
report(reply.message.content)
